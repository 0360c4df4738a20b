"""What is recorded of a head, against the definitions on the matrix itself."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import tiny
import torch
import zoo

import heedful as h
import heedful.hf as hf
from heedful.hf.calls import Call
from heedful.measures import search
from heedful.scan import baseline, heads
from heedful.scan.baseline import Baselines, RandomHead, logit_spreads
from heedful.scan.heads import Kept, Measuring, rows_of, thumbnails, together


def calls_of(name: str, n: int = 24) -> tuple[list[Call], dict]:
    species = tiny.species(name)
    inputs = zoo.texts(species, batch=1, n=n)
    calls: list[Call] = []
    hf.probe(zoo.grow(species), inputs, calls.append)
    return calls, inputs


def dense_of(call: Call, head: int) -> torch.Tensor:
    return call.to(torch.float64).operator().to_dense()[0, head]


def rank(a: torch.Tensor, tau: float) -> int:
    sums = torch.linalg.svdvals(a).square().cumsum(0)
    return int((sums < tau * sums[-1]).sum()) + 1


def _share(entropy: torch.Tensor, outcomes: torch.Tensor) -> float:
    several = outcomes > 1
    return float((entropy[several] / outcomes[several].log()).mean())


@pytest.mark.parametrize("name", ["llama", "bert", "gemma2", "t5", "gpt_oss"])
def test_every_number_is_that_of_the_matrix(name):
    calls, _ = calls_of(name)
    for call in calls[-2:]:
        for row in rows_of(call, None, Measuring(), Baselines()):
            a = dense_of(call, row["head"])
            n, m = a.shape
            sigma = torch.linalg.svdvals(a)
            sink = (1 - a.sum(-1, keepdim=True)).clamp(min=0) if call.sink is not None else a[:, :0]
            entropy = torch.special.entr(torch.cat([a, sink], -1)).sum(-1)  # the sink is one more outcome
            visible = h.segments.visible(call.pattern, n, m, None)
            expected = {
                "rank90": rank(a, 0.9),
                "rank95": rank(a, 0.95),
                "sigma1": float(sigma[0]),
                "energy": float(a.square().sum()),
                "energy10": float(sigma[: -(-min(n, m) // 10)].square().sum() / sigma.square().sum()),
                "stable_rank": float(a.square().sum() / sigma[0] ** 2),
                "entropy": float(entropy.mean()),
                "entropy_share": _share(entropy, visible.sum(-1) + sink.shape[-1]),
                "largest": float(a.amax(-1).mean()),
                "concentration": float(a.sum() / (visible.sum() * a.square().sum()).sqrt()),
                "sink": float(a[1:, 0].mean()) if n == m else None,
            }
            for column, value in expected.items():
                if value is not None:
                    assert row[column] == pytest.approx(value, rel=2e-4, abs=2e-6), (call.name, column)
            assert row["rank90_low"] <= row["rank90"] <= row["rank90_high"]
            assert row["sigma"] == pytest.approx(sigma.tolist()[: len(row["sigma"])], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_places_are_counted_from_each_query(name):
    calls, _ = calls_of(name)
    for row in rows_of(calls[0], None, Measuring(), Baselines()):
        a = dense_of(calls[0], row["head"])
        n = len(a)
        for offset in (-2, -1, 0, 1, 2):
            there = torch.diagonal(a, offset)
            assert row[f"offset_{offset}"] == pytest.approx(float(there.mean()), rel=1e-4, abs=1e-6)
        i, j = torch.arange(n)[:, None], torch.arange(n)
        assert row["distance"] == pytest.approx(float((a * (i - j).abs()).sum(-1).mean()), rel=1e-4)
        assert row["first"] == pytest.approx(float(a[4:, :4].sum(-1).mean()), rel=1e-4)


def test_position_share_is_the_energy_of_the_nearest_matrix_of_offsets_and_first_key():
    calls, _ = calls_of("llama")
    for row in rows_of(calls[1], None, Measuring(), Baselines()):
        a = dense_of(calls[1], row["head"])
        n = len(a)
        i, j = torch.arange(n)[:, None], torch.arange(n)[None]
        basis = [(j == 0).expand(n, n)]
        basis += [((j - i) == offset) & (j > 0) for offset in range(-8, 9)]
        flat = torch.stack([x.double().flatten() for x in basis if bool(x.any())], -1)
        fitted = flat @ torch.linalg.lstsq(flat, a.flatten()[:, None]).solution
        assert row["position_share"] == pytest.approx(float(fitted.square().sum() / a.square().sum()), rel=1e-4)


def test_what_a_call_leaves_to_the_next_changes_nothing():
    kept, base = Kept(), Baselines()
    for name, n in (("llama", 24), ("bert", 24), ("llama", 17), ("t5", 24), ("bart", 24)):
        calls, inputs = calls_of(name, n)
        for call in calls:
            own = call.q.shape[-2] == call.k.shape[-2] == inputs["input_ids"].shape[-1]
            tokens = inputs["input_ids"][:, None] if own else None
            assert rows_of(call, tokens, Measuring(), base, kept) == rows_of(call, tokens, Measuring(), base)


def test_heads_are_measured_together_in_groups_as_even_as_can_be(monkeypatch):
    call = calls_of("llama")[0][0]
    assert together(call) == [(0, 4)]
    monkeypatch.setattr(heads, "TOGETHER", 3 * 24 * 24)
    assert together(call) == [(0, 2), (2, 4)]
    monkeypatch.setattr(heads, "FORMED", 24)
    assert together(call) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_cross_attention_has_no_offsets():
    calls, _ = calls_of("bart")
    cross = next(call for call in calls if call.kind == "cross")
    row = rows_of(cross, None, Measuring(), Baselines())[0]
    assert "offset_0" not in row and "distance" not in row and row["rank90"] >= 1 and "sink" in row


def test_the_spread_of_the_logits_is_the_mean_variance_within_rows():
    calls, _ = calls_of("gemma2")
    call = calls[0].part(1, 2)
    z = (call.q[0, 0] @ call.k[0, 0].mT * call.scale).double()
    z = call.softcap * torch.tanh(z / call.softcap)
    seen = h.segments.visible(call.pattern, *z.shape, None)
    variances = [z[i][seen[i]].var(correction=0) for i in range(len(z)) if int(seen[i].sum()) > 1]
    assert logit_spreads(call)[0] == pytest.approx([float(torch.stack(variances).mean()) ** 0.5], rel=1e-5)


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_each_head_has_the_spread_of_its_own_logits(name, monkeypatch):
    """Sampled rows, in parts, under padding, with a bias that hides keys."""
    monkeypatch.setattr(baseline, "SAMPLED", 11)
    monkeypatch.setattr(baseline, "ROWS", 4)
    call = calls_of(name)[0][0]
    ids = torch.tensor([0] * 20 + [-1] * 4)
    hiding = torch.zeros(1, 1, 24, 24)
    hiding[..., 3] = torch.finfo(torch.float32).min
    call = replace(call, segments=ids, bias=hiding if call.bias is None else call.bias + hiding)
    seen = h.segments.visible(call.pattern, 24, 24, ids)
    seen[:, 3] = False
    rows = torch.linspace(0, 19, 11).round().long()
    wanted = []
    for head in range(call.heads):
        z = (
            call.q[0, head] @ call.per_head(call.k)[0, head].mT * call.scale
            + call.bias.expand(1, call.heads, 24, 24)[0, head]
        ).double()
        variances = [z[i][seen[i]].var(correction=0) for i in rows if int(seen[i].sum()) > 1]
        wanted.append(float(torch.stack(variances).mean()) ** 0.5)
    assert logit_spreads(call)[0] == pytest.approx(wanted, rel=1e-5)


def random_call(n: int, spread: float, seed: int, pattern=None) -> Call:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 1, n, 16, generator=generator) for _ in range(2))
    scale = spread / 4  # Var q·k = 16
    return Call("random", 0, "causal", q, k, k, scale, pattern or h.Causal())


@pytest.mark.parametrize("spread", [0.7, 2.0, 5.0])
def test_a_random_head_is_like_its_baseline(spread):
    row = rows_of(random_call(300, spread, seed=5), None, Measuring(), Baselines())[0]
    assert row["logit_std"] == pytest.approx(spread, rel=0.1)
    # Two draws of a head of 300 tokens differ by several percent in rank.
    for column in ("rank90", "rank95", "energy10", "entropy"):
        assert row[column] == pytest.approx(row[f"base_{column}"], rel=0.15), column


@pytest.mark.parametrize("spread", [1.1, 2.6, 4.4])
def test_between_two_nodes_the_baseline_errs_by_little(spread):
    base = Baselines()
    head = RandomHead(128, 128, h.Full(), 16)
    read, [taken] = base.of(head, spread), base.measured(head, [spread])
    assert read is not None
    assert read.rank95 == pytest.approx(taken.rank95, rel=0.03, abs=0.5)
    assert read.rank90 == pytest.approx(taken.rank90, rel=0.03, abs=0.5)
    assert read.entropy == pytest.approx(taken.entropy, rel=0.02)


def test_baselines_do_not_depend_on_what_was_asked_before():
    one, two, head = Baselines(), Baselines(), RandomHead(40, 40, h.Causal(), 8)
    one.of(head, 3.0)
    assert one.of(head, 1.3) == two.of(head, 1.3)


def test_spreads_that_are_measured_together_give_what_each_gives_alone():
    base, head = Baselines(), RandomHead(600, 600, h.Causal(), 8)
    together, alone = base.measured(head, [0.5, 2.0]), [base.measured(head, [x])[0] for x in (0.5, 2.0)]
    for a, b in zip(together, alone, strict=True):
        assert a.rank90 == b.rank90 and a.entropy == pytest.approx(b.entropy, rel=1e-6)


def test_there_is_a_baseline_where_heads_are_not_formed(monkeypatch):
    head = RandomHead(600, 600, h.Causal(), 8)
    formed = Baselines().of(head, 2.0)
    for module in (heads, search):
        monkeypatch.setattr(module, "FORMED", 0)
    found = Baselines().of(head, 2.0)
    assert found is not None and formed is not None
    assert found.rank90 == pytest.approx(formed.rank90, rel=0.05)
    assert found.entropy == pytest.approx(formed.entropy, rel=1e-5)


def test_a_uniform_head_has_a_baseline_too():
    row = rows_of(random_call(50, 0.0, seed=0), None, Measuring(), Baselines())[0]
    assert row["logit_std"] == 0 and row["entropy_share"] == pytest.approx(1, rel=1e-5)
    assert row["base_entropy"] == pytest.approx(sum(log(i) for i in range(1, 51)) / 50, rel=0.01)


def test_a_picture_is_the_mean_over_blocks():
    call = random_call(100, 2.0, seed=1)
    [found] = thumbnails(call.operator(), cells=10)
    a = dense_of(call, 0)
    means = a.reshape(10, 10, 10, 10).mean((1, 3))
    assert (
        found["pooling"] == "mean" and found["tokens_per_cell"] == 10 and (found["height"], found["width"]) == (10, 10)
    )
    assert found["scale"] == pytest.approx(float(means.max()), rel=1e-5)
    shown = torch.tensor(found["cells"]).reshape(10, 10) / 255 * found["scale"]
    assert float((shown - means).abs().max()) <= found["scale"] / 255
    [small] = thumbnails(random_call(7, 2.0, seed=1).operator().to_dense(), cells=10)
    assert small["pooling"] == "none" and len(small["cells"]) == 49


def test_one_head_and_one_token_will_do():
    call = random_call(1, 1.0, seed=0)
    row = rows_of(call, None, Measuring(), Baselines())[0]
    assert row["rank90"] == 1 and row["entropy"] == 0 and row["distance"] == 0


@pytest.mark.parametrize("formed", [True, False])
def test_ranks_are_good_whether_heads_are_formed_or_not(formed, monkeypatch):
    """Blocks are twice as wide where heads are not formed: as many products would be half the steps."""
    monkeypatch.setattr(search, "EXACT", 0)
    if not formed:
        for module in (search, heads):
            monkeypatch.setattr(module, "FORMED", 0)
    call = random_call(600, 4.0, seed=3)
    [row] = rows_of(call, None, Measuring(), Baselines())
    squares = torch.linalg.svdvals(dense_of(call, 0)).square()
    for name, tau in (("rank90", 0.9), ("rank95", 0.95)):
        exact = int((squares.cumsum(0) < tau * squares.sum()).sum()) + 1
        assert row[f"{name}_low"] <= exact <= row[f"{name}_high"]
        assert abs(row[name] - exact) <= 0.05 * exact
