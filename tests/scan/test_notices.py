"""What a reader has to know before the numbers: in the manifest, on the terminal and on the page."""

from __future__ import annotations

import json
import warnings

import pytest
import tiny
import torch
import zoo
from safetensors.torch import load_file, save_file
from test_command import heedful
from transformers import SiglipVisionConfig, SiglipVisionModel

from heedful import hf
from heedful.hf.modules import Notice
from heedful.notices import notices, too_few
from heedful.scan import Scan


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text(tiny.prose(60))
    return path


def html(scan) -> str:
    return scan.report(scan.folder / "page.html").read_text()


def changed(folder, weights):
    path = tiny.saved(folder) / "model.safetensors"
    save_file({key: x.contiguous() for key, x in weights(load_file(path)).items()}, path, {"format": "pt"})
    return folder


def foreign(share: float, length: int = 60) -> str:
    """Text of which this share is in no vocabulary."""
    words = tiny.prose(length).split()
    return " ".join("zzz" if at < round(share * length) else word for at, word in enumerate(words))


def test_random_weights_are_refused_and_where_asked_for_told_everywhere(tmp_path, text):
    folder = changed(
        tmp_path / "half", lambda weights: {key: x for key, x in weights.items() if "layers.1.self_attn" not in key}
    )
    arguments = ("scan", folder, "--texts", text, "--lengths", 32, "--out", tmp_path / "run")
    code, out, said = heedful(*arguments)
    assert code == 2 and not out and "model.layers.1.self_attn.k_proj.weight" in said and "--allow-random" in said
    assert not (tmp_path / "run").exists()
    code, out, said = heedful(*arguments, "--allow-random")
    assert code == 0 and "Random weights were measured: 4" in " ".join(out.split()) and "note: Random weights" in said
    found = Scan.open(tmp_path / "run")
    assert found.manifest["weights"]["random"]["count"] == 4
    page = html(found)
    assert "Random weights were measured: 4" in page and "测到的是随机权重：4" in page
    code, out, _ = heedful(*arguments, "--allow-random", "--resume", "--json")
    assert code == 0 and len(json.loads(out)) == 8, "weights drawn at random are the same each time"


def test_a_prefix_that_was_removed_is_told_and_changes_no_number(tmp_path, folder, text):
    prefixed = changed(tmp_path / "prefixed", lambda weights: {f"module.{key}": x for key, x in weights.items()})
    tables = []
    for model, out in ((prefixed, tmp_path / "one"), (folder, tmp_path / "two")):
        code, shown, _ = heedful("scan", model, "--texts", text, "--lengths", 32, "--out", out)
        assert code == 0
        assert ("The prefix 'module.' was removed" in shown) == (model == prefixed)
        tables.append(Scan.open(out).table().drop("seconds"))
    assert tables[0].equals(tables[1])
    assert "weights" not in Scan.open(tmp_path / "two").manifest and not notices(Scan.open(tmp_path / "two").manifest)


# ---- unknown tokens


def test_unknown_tokens_are_counted_among_those_of_the_text():
    tokenizer = tiny.tokenizer()
    ids = tokenizer("w1 w2 zzz w3", return_tensors="pt")["input_ids"]
    assert hf.prose.unknown_share(tokenizer, ids) == 0.25
    padded = torch.cat([torch.zeros_like(ids), ids], -1)
    assert hf.prose.unknown_share(tokenizer, padded) == 0.25, "padding stands for no text"


@pytest.mark.parametrize("share", [0.04, 0.06, 0.46])
def test_a_text_with_unknown_tokens_is_told_from_five_percent_on(model, share):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = hf.scan(
            model,
            tiny.tokenizer(),
            [tiny.prose(50), foreign(share, 50)],
            lengths=[50],
            options=hf.ScanOptions(layers=[0]),
        )
    said = [str(each.message) for each in caught if issubclass(each.category, Notice)]
    told = [sentence for sentence in said if "of the tokens of text 0001" in sentence]
    assert len(told) == (share >= 0.05)
    assert bool(notices(found.manifest)) == bool(notices(found.manifest, "zh")) == (share >= 0.05)
    assert found.manifest["texts"][0]["unknown"] == 0
    assert found.manifest["texts"][1]["unknown"] == pytest.approx(share, abs=0.01)


def test_a_text_that_the_tokenizer_hardly_knows_is_refused_unless_asked_for(folder, tmp_path):
    path = tmp_path / "foreign.txt"
    path.write_text(foreign(0.6, 32) + " " + tiny.prose(20))
    arguments = ("scan", folder, "--texts", path, "--lengths", 32, "--out", tmp_path / "run")
    code, out, said = heedful(*arguments)
    assert code == 2 and not out and "the tokenizer does not know" in said and "--allow-unknown" in said
    code, out, _ = heedful(*arguments, "--allow-unknown")
    assert code == 0 and "The tokenizer does not know" in out
    assert "The tokenizer does not know" in html(Scan.open(tmp_path / "run"))


def test_a_folder_without_a_tokenizer_is_not_given_an_empty_one(tmp_path, text):
    zoo.grow(tiny.species("bert")).save_pretrained(tmp_path / "bert")
    assert hf.load(tmp_path / "bert")[1] is None
    code, _, said = heedful("scan", tmp_path / "bert", "--texts", text, "--lengths", 32)
    assert code == 2 and "this model came without one; give token ids" in said


def test_a_tokenizer_that_is_damaged_is_told(tmp_path, text):
    folder = tiny.saved(tmp_path / "tiny")
    (folder / "tokenizer.json").write_text("{")
    code, _, said = heedful("scan", folder, "--texts", text, "--lengths", 32)
    assert code == 2 and "tokenizer: the one that came with this model can't be read" in said


def test_a_tokenizer_of_a_larger_model_is_refused(model):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{at}": at for at in range(500)} | {"<unk>": 500}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(hf.Refused, match=r"gives token 400 \('w400'\), the model has embeddings for 0 to 60"):
        hf.encode(model, PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>"), "w3 w400")


def test_text_for_a_model_of_images_is_refused():
    vision = zoo.grow(tiny.species("vit"))
    for texts in (["some words"], [tiny.ids(1, 20)[0]]):
        with pytest.raises(hf.Refused, match="ViTModel reads pixel_values, not text"):
            hf.scan(vision, None, texts)


# ---- the rest


def test_a_head_out_of_sight_is_told():
    config = SiglipVisionConfig(
        hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=2,
        num_channels=1,
    )  # fmt: skip
    found = hf.scan(SiglipVisionModel(config).eval(), None, [{"pixel_values": torch.randn(1, 1, 16, 16)}])
    assert notices(found.manifest)[0].startswith("Not measured: head.attention")


def test_a_few_tokens_get_no_verdict(model):
    found = hf.scan(model, None, tiny.ids(2, 31), lengths=[31])
    assert found.table()["kind_of_head"].to_list() == [None] * 8
    for language in ("en", "zh"):
        assert too_few(31, language) in found.words(language) and too_few(31, language) in html(found)
    assert "low rank beside" not in found.words() and "could be cheaper" not in found.words()
    assert "no verdict" in repr(found.head(0, 0))
    longer = hf.scan(model, None, tiny.ids(2, 32), lengths=[32])
    assert None not in longer.table()["kind_of_head"].to_list() and "No verdict" not in longer.words()
