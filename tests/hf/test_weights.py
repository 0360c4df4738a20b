"""Stored weights that do not fit their model, and folders that hold no model: each is refused by name."""

from __future__ import annotations

import json
import shutil
import sys
import warnings

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'heedful[hf]'")

import torch
import zoo
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import heedful.hf as hf
from heedful.hf.modules import Notice
from heedful.hf.weights import loaded

loading = sys.modules["heedful.hf.load"]
SPECIES = {species.name: species for species in [*zoo.CAPTURED, *zoo.OTHERS]}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    monkeypatch.setattr(loading, "_hub_in_reach", lambda: False)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Folders of small models, saved once."""
    root, made = tmp_path_factory.mktemp("kept"), {}

    def folder(name: str):
        if name not in made:
            zoo.grow(SPECIES[name]).save_pretrained(root / name)
            made[name] = root / name
        return made[name]

    return folder


@pytest.fixture
def copy(kept, tmp_path):
    """A copy of such a folder with other weights or another configuration."""

    def copied(name: str = "llama", weights=None, **config):
        path = tmp_path / f"{name} copy"
        shutil.copytree(kept(name), path, dirs_exist_ok=True)
        if weights is not None:
            changed = weights(load_file(path / "model.safetensors"))
            save_file({key: x.contiguous() for key, x in changed.items()}, path / "model.safetensors", {"format": "pt"})
        stored = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(stored | config))
        return path

    return copied


def refusal(folder, **options) -> str:
    with pytest.raises(hf.Refused) as caught:
        hf.load(folder, **options)
    return str(caught.value)


def renamed(prefix: str):
    return lambda weights: {prefix + key: x for key, x in weights.items()}


def without(*parts: str):
    return lambda weights: {key: x for key, x in weights.items() if not any(part in key for part in parts)}


# ---- missing, unexpected, mismatched


def test_weights_that_are_not_stored_are_refused_by_name(copy):
    said = refusal(copy(weights=without("q_proj", "k_proj")))
    assert "do not fit LlamaForCausalLM. 4 weights are not in the file and would be random" in said
    assert "model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.q_proj.weight" in said
    assert "allow_random=True" in said


def test_of_many_names_a_few_are_told_and_the_others_counted(copy):
    said = refusal(copy(weights=without("layers.1.")))
    assert "9 weights are not in the file" in said and "model.layers.1.input_layernorm.weight" in said
    assert said.count("model.layers.1.") == 4 and "and 5 more" in said


@pytest.mark.parametrize("lost", ["embed_tokens", "input_layernorm", "v_proj", "mlp.down_proj"])
def test_everything_before_the_last_attention_call_counts(copy, lost):
    assert f"{lost}.weight" in refusal(copy(weights=without(lost)))


def test_layers_that_the_configuration_lacks_are_refused(copy):
    said = refusal(copy(num_hidden_layers=1))
    assert "9 weights are in the file and not in the model: model.layers.1.input_layernorm.weight" in said


def test_attention_weights_under_names_that_nobody_knows_are_refused(copy):
    extra = {"adapter.self_attn.q_proj.weight": torch.zeros(2, 2)}
    assert "adapter.self_attn.q_proj.weight" in refusal(copy(weights=lambda weights: weights | extra))


def test_weights_of_another_shape_are_refused_with_both_shapes(copy):
    said = refusal(copy(vocab_size=99))
    assert "1 weight is of another shape: model.embed_tokens.weight 61 × 32, expected 99 × 32" in said
    assert "above report" not in said


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("llama", "module."),
        ("llama", "_orig_mod."),
        ("bert", "module._orig_mod."),
        ("bert", "model."),
        ("t5", "module."),
    ],
)
def test_a_known_prefix_is_removed_and_told(copy, kept, name, prefix):
    with pytest.warns(Notice, match=f"The prefix '{prefix}' was removed"):
        model, _ = hf.load(copy(name, renamed(prefix)))
    plain = hf.load(kept(name))[0].state_dict()
    assert all(torch.equal(x, plain[key]) for key, x in model.state_dict().items())
    assert loaded(model).described() == {"prefix": prefix}


def test_a_prefix_that_is_unknown_is_refused(copy):
    assert "20 weights are not in the file" in refusal(copy(weights=renamed("teacher.")))
    some = lambda weights: {("teacher." if "layers.0" in key else "") + key: x for key, x in weights.items()}  # noqa: E731
    assert "9 weights are not in the file" in refusal(copy(weights=some))


def test_random_weights_are_taken_where_asked_for_and_are_the_same_each_time(copy):
    folder = copy(weights=without("q_proj"))
    with pytest.warns(Notice, match="Random weights were measured: 2 .*layers.0.self_attn.q_proj.weight"):
        one, _ = hf.load(folder, allow_random=True)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.warns(Notice):
        two, _ = hf.load(folder, allow_random=True)
    assert all(torch.equal(x, two.state_dict()[key]) for key, x in one.state_dict().items())
    assert torch.equal(before, torch.get_rng_state()), "the caller's random numbers are left alone"
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    assert loaded(one).described() == {"random": {"count": 2, "names": names}}


def test_stored_weights_that_are_left_out_are_told_and_not_called_random(copy):
    with pytest.warns(Notice, match=r"^9 stored weights have no place in the model and were left out \(model.layers.1"):
        model, _ = hf.load(copy(num_hidden_layers=1), allow_random=True)
    assert "random" not in loaded(model).described()


def test_experts_that_can_not_be_joined_are_named(tmp_path, capfd):
    config = Qwen3MoeConfig(**zoo.LLAMA, **zoo.EXPERTS)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.experts.0.down_proj.weight"] = torch.zeros(3, 16)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    said = refusal(tmp_path)
    assert "the stored parts of model.layers.1.mlp.experts.down_proj can't be joined" in said
    assert "above report" not in said and "LOAD REPORT" not in capfd.readouterr().err


# ---- what is harmless


@pytest.fixture
def quietly():
    """A notice is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        yield


def test_a_model_fits_itself(kept, quietly):
    for name in ("llama", "bert", "t5", "gpt2"):
        hf.load(kept(name))


@pytest.mark.usefixtures("quietly")
def test_heads_and_poolers_that_are_lacking_or_left_over_do_no_harm(copy, tmp_path):
    config = BertConfig(**zoo.BERT)
    # the base model alone under the name of one with a head, which lacks a pooler
    model, _ = hf.load(copy("bert", architectures=["BertForMaskedLM"]))
    assert type(model) is BertForMaskedLM
    # a head of another kind, and no pooler
    BertForMaskedLM(config).save_pretrained(tmp_path / "masked")
    stored = json.loads((tmp_path / "masked" / "config.json").read_text())
    (tmp_path / "masked" / "config.json").write_text(
        json.dumps(stored | {"architectures": ["BertForSequenceClassification"]})
    )
    assert type(hf.load(tmp_path / "masked")[0]) is BertForSequenceClassification
    # a head for two labels instead of three
    BertForSequenceClassification(config).save_pretrained(tmp_path / "two")
    stored = json.loads((tmp_path / "two" / "config.json").read_text())
    three = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    (tmp_path / "two" / "config.json").write_text(json.dumps(stored | three))
    assert hf.load(tmp_path / "two")[0].classifier.out_features == 3
    # output embeddings that are not tied, and buffers of old checkpoints
    hf.load(copy("llama", lambda weights: without("lm_head")(weights) | {"model.position_ids": torch.arange(9)}))


# ---- files that are no weights


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-500], "Likely cause: a download or a copy that was cut short"),
        (lambda data: data[:50], "model.safetensors can't be read as safetensors"),
        (lambda data: b"", "model.safetensors can't be read as safetensors"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "run `git lfs pull`"),
    ],
)
def test_a_weight_file_that_is_damaged_is_named(copy, change, said):
    folder = copy()
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    assert said in refusal(folder)


def test_a_weight_file_that_is_lost_is_named(tmp_path):
    zoo.grow(SPECIES["llama"]).save_pretrained(tmp_path, max_shard_size="20KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    assert f"1 of 4 weight files are not there: {lost.name}" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "is no index of weight files" in refusal(tmp_path)


def test_weights_that_were_quantised_are_refused(copy, kept):
    said = refusal(copy(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}))
    assert "its weights are quantised (bitsandbytes)" in said and "Give the checkpoint that they were made from" in said
    small = copy(
        weights=lambda weights: {key: (9 * x).to(torch.int8) if "proj" in key else x for key, x in weights.items()},
        quantization_config=None,
    )
    assert "14 weights are stored as whole numbers (I8)" in refusal(small)
    model, _ = hf.load(kept("llama"))
    whole = model.model.layers[0].mlp.up_proj.weight.detach().to(torch.int8)
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(whole, requires_grad=False)
    with pytest.raises(hf.Refused, match=r"1 weights are quantised, model\.layers\.0\.mlp\.up_proj\.weight first"):
        hf.Probe(model)


def test_a_folder_that_holds_something_else_gets_a_sentence(copy, tmp_path):
    folder = copy()
    (folder / "config.json").write_text("{")
    assert "config.json is no JSON" in refusal(folder)
    (folder / "config.json").write_text("[1]")
    assert "config.json holds a list" in refusal(folder)
    assert "hidden_size" in refusal(copy(hidden_size="many"))
    assert "ZeroDivisionError" in refusal(copy(num_attention_heads=0, hidden_size=32))
    assert "model type `nosuch`" in refusal(copy(model_type="nosuch"))
    folder = copy()
    (folder / "model.safetensors").unlink()
    assert "config.json without weights; expected model.safetensors" in refusal(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    assert "an adapter of some/base, not a model" in refusal(folder)
    (folder / "config.json").unlink()
    assert "an adapter of some/base, not a model" in refusal(folder)


@pytest.mark.parametrize("named", ["NoSuchModel", "LlamaConfig", "PreTrainedModel", "LlamaPreTrainedModel", "pipeline"])
def test_an_architecture_that_is_no_model_is_told(copy, kept, named):
    with pytest.warns(Notice, match=f"config.json names {named}, which is no model of transformers; LlamaModel was"):
        model, _ = hf.load(copy(architectures=[named]))
    plain = hf.load(kept("llama"))[0].model.state_dict()
    assert all(torch.equal(x, plain[key]) for key, x in model.state_dict().items())


def test_progress_is_told_in_words(kept):
    told: list[str] = []
    hf.load(kept("llama"), progress=told.append)
    assert told == ["reading the weights of llama", "reading the tokenizer of llama"]
