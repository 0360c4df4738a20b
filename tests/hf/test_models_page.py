"""Every architecture of docs/models.md: its attention is captured as eager computes it, or the model is refused.

`python tests/hf/test_models_page.py` rewrites the table.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'heedful[hf]'")

import torch
import zoo

import heedful.hf as hf

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TABLE = re.compile(r"(<!-- models: [^\n]* -->\n)(.*?)(<!-- end of models -->)", re.DOTALL)
EAGER = {"self": "encoder_attentions", "causal": "decoder_attentions", "cross": "cross_attentions"}

# Float32 rounds a score of size z by 6e-8·z, and its weight by as much; scores here reach 50, and two layers add up.
TOLERANCE = 2e-5


def eager(model: torch.nn.Module, inputs: dict, kinds: tuple[str, ...]) -> tuple[torch.Tensor, dict[str, list]]:
    """The first output and the attention matrices that transformers itself reports."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = model(**inputs, output_attentions=True)
    finally:
        model.set_attn_implementation(before)
    if kinds == ("self", "causal", "cross"):
        matrices = {kind: list(out[name]) for kind, name in EAGER.items()}
    else:
        matrices = {kinds[0]: [matrix for matrix in out.attentions if matrix is not None]}
    return out[0], matrices


def captured(model: torch.nn.Module, inputs: dict) -> tuple[torch.Tensor, list[hf.Call]]:
    """The first output of the model while it is probed, and all calls."""
    outputs, calls = [], []
    hook = model.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    hf.probe(model, inputs, calls.append)
    hook.remove()
    return outputs[-1], calls


@pytest.mark.parametrize("padding", ["", "right", "left"])
@pytest.mark.parametrize("species", zoo.CAPTURED + zoo.OTHERS, ids=lambda species: species.name)
def test_captured_as_eager_computes_it(species, padding):
    if padding and species.name == "vit":
        pytest.skip("images have no padding")
    model, inputs = zoo.grow(species), zoo.texts(species, padding)
    if "ForCausalLM" in species.model or "LMHead" in species.model:
        inputs["logits_to_keep"] = 0  # all of them, to be compared
    expected, matrices = eager(model, inputs, species.kinds)
    found, calls = captured(model, inputs)

    assert len(calls) == species.calls
    assert {call.kind for call in calls} == set(species.kinds)
    assert {type(call.pattern).__name__ for call in calls} >= set(species.patterns)
    for kind in species.kinds:
        for call, matrix in zip([call for call in calls if call.kind == kind], matrices[kind], strict=True):
            scores = (call.q @ call.per_head(call.k).mT * call.scale).std()
            assert scores > 0.5, "logits near zero can't tell right from wrong"
            assert_rows_equal(call.operator().to_dense(), matrix, call.real)
    ends = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    if species.encoder_decoder and "decoder_attention_mask" not in inputs:
        ends = None
    real = torch.ones(expected.shape[:2], dtype=torch.bool) if ends is None else ends.bool()
    worst = (found - expected).abs()[real].max()
    assert worst <= TOLERANCE * expected.abs().max()


def assert_rows_equal(found: torch.Tensor, expected: torch.Tensor, real: torch.Tensor) -> None:
    difference = (found - expected).abs().amax((1, 3))  # over heads and keys
    assert found.shape == expected.shape
    assert difference[real].max() <= TOLERANCE
    assert (found.abs().amax((1, 3))[~real] == 0).all(), "rows of padding are zero"


@pytest.mark.parametrize("species", zoo.REFUSED, ids=lambda species: species.name)
def test_refused_with_a_reason(species):
    model = zoo.grow(species)
    with pytest.raises(hf.Refused, match=r"computes its weights itself instead of through transformers' AttentionInt"):
        hf.Probe(model)


def table() -> str:
    lines = ["| architecture | attention | verdict |", "|---|---|---|"]
    for species in [*zoo.CAPTURED, *zoo.OTHERS]:
        seen = ", ".join(species.kinds) + (f"; {species.notes}" if species.notes else "")
        lines.append(f"| {species.name} | {seen} | parity with eager |")
    for species in zoo.REFUSED:
        why = hf.objections(zoo.grow(species))[0].partition(" (")[0]
        lines.append(f"| {species.name} | | refused: `{why}` computes its weights itself |")
    return "\n".join(lines) + "\n"


def test_the_page_has_this_table():
    assert TABLE.search(PAGE.read_text())[2] == table(), "run python tests/hf/test_models_page.py"


def test_the_example_of_the_page_runs(monkeypatch, capsys):
    """With a small model in the place of MiniLM, which comes in a package of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    built = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "she": 2, "was": 3}, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, pad_token="[PAD]", unk_token="[UNK]")
    bert = next(species for species in zoo.CAPTURED if species.name == "bert")
    model = zoo.grow(replace(bert, options={**bert.options, "max_position_embeddings": 512}))
    monkeypatch.setattr(hf, "load", lambda name: (model, tokenizer))
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    exec(compile(example, str(PAGE), "exec"), {})
    assert "encoder.layer.1.attention.self self (1, 4, 256, 256)" in capsys.readouterr().out


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda found: found[1] + table() + found[3], PAGE.read_text()))
