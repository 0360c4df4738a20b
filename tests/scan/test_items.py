"""Models whose attention calls have several items for one text: every item is measured, a record has their mean."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import tiny
import torch
import zoo

import heedful as h
import heedful.hf as hf
from heedful.hf.calls import Call
from heedful.scan.baseline import Baselines, logit_spreads
from heedful.scan.heads import Measuring, rows_of, thumbnails, together
from heedful.store.scans import ROWS

ITEMS = {"swin": [16, 16, 4], "patchtst": [3, 3]}


def probed(name: str) -> tuple[torch.nn.Module, dict, list[Call]]:
    species = tiny.species(name)
    model, inputs, calls = zoo.grow(species), zoo.texts(species, batch=1), []
    hf.probe(model, inputs, calls.append)
    return model, inputs, calls


@pytest.mark.parametrize("name", ITEMS)
def test_a_scan_has_the_means_over_items(name, tmp_path):
    model, inputs, calls = probed(name)
    assert [len(call.q) for call in calls] == ITEMS[name]
    found = hf.scan(model, None, [inputs], out=tmp_path / "run")
    rows = {(row["layer"], row["head"]): row for row in found.rows.to_dicts()}
    assert len(rows) == sum(call.heads for call in calls)
    for call in calls:
        a = call.to(torch.float64).operator().to_dense()
        sigma = torch.linalg.svdvals(a)
        energy = sigma.square()
        expected = {
            "energy": energy.sum(-1),
            "sigma1": sigma[..., 0],
            "rank90": (energy.cumsum(-1) < 0.9 * energy.sum(-1, keepdim=True)).sum(-1) + 1.0,
            "entropy": torch.special.entr(a).sum(-1).mean(-1),
            "largest": a.amax(-1).mean(-1),
            "sink": a[:, :, 1:, 0].mean(-1),
        }
        for head in range(call.heads):
            row = rows[call.at, head]
            for column, value in expected.items():
                differ = column == "rank90" or value[:, head].std() > 1e-3
                assert differ, "items that are alike can't tell a mean from the first one"
                assert row[column] == pytest.approx(float(value[:, head].mean()), rel=1e-4), (call.name, column)
            assert row["items"] == len(call.q)
    assert [layer["items"] for layer in found.manifest["layers"]] == ITEMS[name]
    assert f"up to {max(ITEMS[name])}): every number of a head is the mean over them" in found.words()


def test_every_column_is_joined_from_those_of_the_items():
    """Against the rows of the items by themselves, with other matrices, biases and padding for each."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 2, 12, 8).unbind()
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, 9:] = mask[2, :4] = 0
    segments = torch.where(mask > 0, 0, -1)[:, None]
    call = Call("layer", 0, "self", 2 * q, k, k, 0.5, h.Full(), segments, torch.randn(3, 1, 12, 12))
    how, baselines = Measuring(values=6), Baselines(values=6)
    each = [rows_of(call.item(at), None, how, baselines) for at in range(3)]
    joined = rows_of(call, None, how, baselines)
    assert logit_spreads(call) == [[row["logit_std"] for row in rows] for rows in each]
    for head, row in enumerate(joined):
        alone = [rows[head] for rows in each]
        assert row.keys() == alone[0].keys() <= ROWS.keys() and row["items"] == 3
        for name, value in row.items():
            values = [other[name] for other in alone if other[name] is not None]
            if name == "label":
                assert Counter(values)[value] == max(Counter(values).values())
            elif name == "sigma_certified":
                assert value == min(values)
            elif isinstance(value, list):
                assert value == pytest.approx(torch.tensor(values).mean(0).tolist(), rel=1e-5)
            elif name not in ("head", "items") and values:
                assert value == pytest.approx(sum(values) / len(values), rel=1e-5), name


def test_a_picture_is_the_mean_over_items():
    _, _, calls = probed("patchtst")
    pictures = thumbnails(calls[0].operator())
    assert len(pictures) == calls[0].heads
    mean = calls[0].operator().to_dense().mean(0)
    for picture, head in zip(pictures, mean, strict=True):
        assert picture["scale"] == pytest.approx(float(head.max()), rel=1e-5)


def test_items_count_for_the_memory_of_heads_that_are_formed_together():
    q = torch.zeros(1, 4, 1024, 2)
    call = Call("layer", 0, "self", q, q, q, 1.0, h.Full())
    many = replace(call, q=q.expand(6, -1, -1, -1), k=q.expand(6, -1, -1, -1), v=q.expand(6, -1, -1, -1))
    assert together(call) == [(0, 4)] and together(many) == [(0, 2), (2, 4)]


def test_two_models_differ_by_the_mean_over_items(tmp_path):
    model, inputs, calls = probed("patchtst")
    other, theirs = zoo.grow(tiny.species("patchtst"), seed=1), []
    hf.probe(other, inputs, theirs.append)
    found = hf.scan(model, None, [inputs], out=tmp_path / "run", options=hf.ScanOptions(against=other))
    delta = {(row["layer"], row["head"]): row for row in found._run.delta().to_dicts()}
    for one, two in zip(calls, theirs, strict=True):
        energy = (one.operator().to_dense() - two.operator().to_dense()).square().sum((-2, -1)).mean(0)
        for head, value in enumerate(energy.tolist()):
            assert delta[one.at, head]["energy"] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("hides", [-100.0, float("-inf"), torch.finfo(torch.float32).min])
def test_keys_that_a_bias_hides_are_not_visible(hides):
    """Shifted windows of Swin are masked by −100: the spread of logits and shares of visible keys leave them out."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 10, 8).unbind()
    bias = torch.randn(1, 2, 10, 10)
    group = torch.arange(10) < 4
    bias = torch.where(group[:, None] == group, bias, bias + hides if hides == -100 else torch.tensor(hides))
    call = Call("layer", 0, "self", q, k, k, 0.5, h.Full(), bias=bias)
    for head, row in enumerate(rows_of(call, None, Measuring(), Baselines())):
        a = call.to(torch.float64).operator().to_dense()[0, head]
        seen = group[:, None] == group
        z = (q[0, head] @ k[0, head].mT * 0.5 + bias[0, head]).double()
        spread = torch.stack([z[i][seen[i]].var(correction=0) for i in range(10)]).mean().sqrt()
        share = torch.special.entr(a).sum(-1) / seen.sum(-1).double().log()
        assert row["logit_std"] == pytest.approx(float(spread), rel=1e-4)
        assert row["entropy_share"] == pytest.approx(float(share.mean()), rel=1e-4)
        assert row["concentration"] == pytest.approx(float(a.sum() / (seen.sum() * a.square().sum()).sqrt()), rel=1e-4)
