"""DiffLlama: heads are A₁ − λA₂, shown once for each layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'heedful[hf]'")

import torch
import zoo

import heedful.hf as hf
from heedful.hf import differential

SPECIES = zoo.Species(
    "diffllama", "DiffLlamaModel", "DiffLlamaConfig", {**zoo.LLAMA, "num_key_value_heads": 2, "attention_dropout": 0.0}
)


def grown() -> torch.nn.Module:
    model = zoo.grow(SPECIES)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lambda" in name:
                weight.normal_(0, 0.1)
    return model


def joined_by(model: torch.nn.Module, inputs: dict) -> list[torch.Tensor]:
    """(A₁ − λA₂) V of each layer, as the model itself makes it."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.groupnorm.register_forward_pre_hook(lambda module, args: found.append(args[0]))
        for layer in model.layers
    ]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("padding", ["", "left"])
def test_heads_are_differences_and_are_shown_once(padding):
    model, inputs, calls = grown(), zoo.texts(SPECIES, padding), []
    hf.probe(model, inputs, calls.append)
    assert [(call.at, call.turn, call.heads) for call in calls] == [(0, 0, 2), (1, 0, 2)]
    for call, joined, layer in zip(calls, joined_by(model, inputs), model.layers, strict=True):
        first = call.softmaxes.operator().to_dense()
        own = layer.self_attn
        factor = (own.lambda_q1 @ own.lambda_k1).exp() - (own.lambda_q2 @ own.lambda_k2).exp() + own.lambda_init
        factor = factor.detach()
        assert call.minus == pytest.approx(float(factor), rel=1e-6) and abs(call.minus) > 0.05
        a = call.operator().to_dense()
        torch.testing.assert_close(a, first[:, :2] - factor * first[:, 2:])
        assert bool((a < 0).any()) and a.shape == call.operator().shape
        found = (call.operator() @ call.per_head(call.v)[:, :2]).transpose(1, 2)  # the first half of the values
        real = call.real[..., None, None]
        torch.testing.assert_close(found * real, joined[..., :8] * real, rtol=1e-4, atol=1e-4)


def test_parts_and_items_are_those_of_the_differences():
    calls = []
    hf.probe(grown(), zoo.texts(SPECIES), calls.append)
    whole = calls[0].operator().to_dense()
    torch.testing.assert_close(calls[0].part(1, 2).operator().to_dense(), whole[:, 1:])
    torch.testing.assert_close(calls[0].item(1).operator().to_dense(), whole[1:])
    low = replace(calls[0], q=calls[0].q.bfloat16(), k=calls[0].k.bfloat16(), v=calls[0].v.bfloat16())
    torch.testing.assert_close(low.operator().float().to_dense(), whole, rtol=0, atol=0.1)


def test_a_scan_measures_the_differences(tmp_path):
    model, calls = grown(), []
    ids = zoo.texts(SPECIES, batch=1)["input_ids"]
    hf.probe(model, {"input_ids": ids}, calls.append)
    found = hf.scan(model, None, [ids[0]], out=tmp_path / "run")
    rows = {(row["layer"], row["head"]): row for row in found.rows.to_dicts()}
    assert sorted(rows) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for call in calls:
        for head, a in enumerate(call.to(torch.float64).operator().to_dense()[0]):
            row, size = rows[call.at, head], a.abs()
            sigma = torch.linalg.svdvals(a)
            visible = torch.ones(24, 24).tril().sum()
            expected = {
                "energy": a.square().sum(),
                "sigma1": sigma[0],
                "stable_rank": a.square().sum() / sigma[0] ** 2,
                "entropy": torch.special.entr(size / size.sum(-1, keepdim=True)).sum(-1).mean(),
                "concentration": size.sum() / (visible * a.square().sum()).sqrt(),
                "largest": size.amax(-1).mean(),
                "sink": size[1:, 0].mean(),
                "offset_-1": size.diagonal(-1).mean(),
                "position_share": position_share(a),
            }
            for column, value in expected.items():
                assert row[column] == pytest.approx(float(value), rel=1e-4), column
            for column in ("distance", "logit_std", "base_rank90", "base_entropy"):
                assert row[column] is None, "softmax of noise is no rival of a difference"


def position_share(a: torch.Tensor) -> torch.Tensor:
    """By the definition in scan/heads.py: diagonals without their entry in the first column, and that column."""
    n = len(a)
    parts = [a[:, 0]]
    for offset in range(-8, 9):
        i = torch.arange(max(0, -offset), min(n, n - offset))
        i = i[i + offset != 0]
        parts.append(a[i, i + offset])
    return torch.stack([part.sum() ** 2 / len(part) for part in parts]).sum() / a.square().sum()


def test_another_factor_is_caught(monkeypatch):
    plain = differential.subtracted
    monkeypatch.setattr(
        "heedful.hf.tap.subtracted", lambda module: (plain(module) or 0) + 0.01 if plain(module) else None
    )
    with pytest.raises(hf.CheckFailed, match=r"outputs of A₁ − λA₂ differ"):
        hf.probe(grown(), zoo.texts(SPECIES), lambda call: None)


def test_two_calls_with_the_same_queries_and_keys_are_refused_where_it_is_not_known_why(monkeypatch):
    monkeypatch.setattr(differential, "MODULES", {})
    with pytest.raises(hf.Refused, match="attends twice with the same queries and keys"):
        hf.probe(grown(), zoo.texts(SPECIES), lambda call: pytest.fail("was measured"))
