"""The fuzzer: some of its calls, that its comparison can fail, and what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import heedful as h
from heedful.testing.case import dense

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import fuzz

CALLS = 60


def test_sixty_calls_have_no_unexplained_failure():
    found = [fuzz.run(12, call) for call in range(CALLS)]
    failed = [f"{line['reproduce']} {line['entry']}: {line['why']}" for line in found if line["verdict"] == "failed"]
    assert not failed, "\n".join(failed)
    assert sum(line["verdict"] == "ok" for line in found) > 0.8 * CALLS
    assert len({line["entry"] for line in found}) > 25


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_result_that_is_a_little_wrong_is_a_failure(monkeypatch, dtype):
    """An output that is off by a hundredth, in any precision: naive bfloat16 errs by less than that."""
    monkeypatch.setattr(fuzz, "DTYPES", {dtype: 1})
    monkeypatch.setattr(fuzz, "LOGITS", {1.0: 1})
    right, call = h.Linear.forward, h.Linear.__call__
    own = [number for number in range(300) if next(fuzz.draw(3, number)).entry == "linear-relu"][:8]
    before = [fuzz.run(3, number)["verdict"] for number in own]
    monkeypatch.setattr(h.Linear, "forward", lambda self, *x, **given: right(self, *x, **given) * 1.03)
    after = [fuzz.run(3, number) for number in own]
    assert call is h.Linear.__call__ and "failed" not in before
    assert sum(line["verdict"] == "failed" for line in after) >= before.count("ok") / 2
    assert all("--only 3:" in line["reproduce"] for line in after if line["verdict"] == "failed")


def drawn(seed, number):
    """The whole call of that number, or None where building its mechanism is refused."""
    try:
        return list(fuzz.draw(seed, number))[-1]
    except ValueError:
        return None


def test_a_gradient_that_is_a_little_wrong_is_a_failure(monkeypatch):
    """One that is off by a hundredth, where more than one key is seen: gradients in q and k are not zero there."""
    monkeypatch.setattr(fuzz, "DTYPES", {torch.float32: 1})
    monkeypatch.setattr(fuzz, "LOGITS", {1.0: 1})
    right = h.Linear.forward

    def wrong(self, *x, **given):
        out = right(self, *x, **given)
        return out + 0.01 * (out - out.detach())

    own = [number for number in range(300) if next(fuzz.draw(3, number)).entry in ("linear-relu", "linear")]
    made = {number: call for number in own if (call := drawn(3, number)) is not None}
    learning = [number for number, call in made.items() if "q" in call.wants and call.about["m"] > 2][:6]
    monkeypatch.setattr(h.Linear, "forward", wrong)
    verdicts = [fuzz.run(3, number)["verdict"] for number in learning]
    assert verdicts.count("failed") > 0.8 * (len(learning) - verdicts.count("refused")) > 1, verdicts


def test_results_are_appended_and_taken_up_again(tmp_path, monkeypatch, capsys):
    out = tmp_path / "calls.jsonl"
    for calls in (3, 5):
        monkeypatch.setattr(sys, "argv", ["fuzz.py", "--calls", str(calls), "--seed", "12", "--out", str(out)])
        assert fuzz.main() == 0
        assert [json.loads(line)["call"] for line in out.read_text().splitlines()] == list(range(calls))
    assert "0 failures" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--of", str(out), "--summary", str(tmp_path / "counts.json")])
    assert fuzz.main() == 0
    told = json.loads((tmp_path / "counts.json").read_text())
    assert told["all"]["calls"] == sum(own["calls"] for own in told["entries"].values()) == 5
    assert told["failures"] == [] and told["files"] == {"calls": 5}


# What the fuzzer found, one call each.


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ["l2", "memory", "softmax"])
def test_values_may_have_batch_axes_that_queries_and_keys_lack(name):
    """Gradients where the weights of a row have no formula of their own for the backward pass."""
    options = {"sink": torch.nn.Parameter(torch.tensor(0.3))} if name == "softmax" else {}
    attend = h.build(name, **options).double()
    q, k, v, g = draw(2, 9, 4), draw(2, 9, 4, seed=1), draw(3, 2, 9, 5, seed=2), draw(3, 2, 9, 5, seed=3)
    wanted = [x.requires_grad_() for x in (q, k, v)] + list(attend.parameters())
    got, want = (torch.autograd.grad(out, wanted, g) for out in (attend(q, k, v), dense(attend, q, k, v)))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["hedgehog", "linear-exp", "linear"])
def test_linear_attention_needs_no_batch_axes(name):
    asked = {"d": 4} if name == "hedgehog" else {}
    attend = h.build(name, **asked).double()
    q, k, v = draw(7, 4), draw(7, 4, seed=1), draw(7, 3, seed=2)
    want = dense(attend, q, k, v)
    torch.testing.assert_close(attend(q, k, v), want, rtol=0, atol=1e-12)
    out, state = attend.prefill(q[:6], k[:6], v[:6])
    last, _ = attend.step(state, q[6:], k[6:], v[6:])
    torch.testing.assert_close(torch.cat([out, last]), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "build", [lambda: h.Linear(h.Hedgehog(4, 3)), lambda: h.Retention(torch.tensor([0.5, 0.9, 1.0]))]
)
def test_a_pair_of_segments_may_differ_by_head_where_features_or_decays_do(build):
    attend = build().double()
    q, k, v = draw(2, 3, 8, 4), draw(2, 3, 8, 4, seed=1), draw(2, 3, 8, 5, seed=2)
    ids = torch.randint(-1, 2, (2, 3, 8), generator=torch.Generator().manual_seed(3))
    for segments in ((ids, ids), (ids[:1], ids[:1]), (ids[0], ids[0])):
        torch.testing.assert_close(
            attend(q, k, v, segments=segments), dense(attend, q, k, v, segments), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("name", ["softmax", "linear", "nystrom", "left"])
def test_a_width_of_zero_is_refused_in_a_sentence(name):
    q, v = torch.randn(2, 5, 0), torch.randn(2, 5, 3)
    for call in (lambda a: a(q, q, v), lambda a: a(q, q, q), lambda a: a.matrix(q, q)):
        with pytest.raises(ValueError, match=r"q: width 0 .*expected at least 1"):
            call(h.build(name))


def test_steps_of_trigonometric_features_go_on_on_the_scale_of_prefill():
    """‖k‖²/2 is cut, in float64 where the step is computed as in float32 where prefill is."""
    attend = h.build("trig", d=4, features=8, pattern=h.Causal())
    q, k, v = (draw(9, 4, seed=seed).float() for seed in range(3))
    q, k = 40 * q, 40 * k
    _, state = attend.prefill(q[:8], k[:8], v[:8])
    last, _ = attend.step(state, q[8:], k[8:], v[8:])
    torch.testing.assert_close(last, dense(attend, q, k, v)[8:], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["linear", "retention-norm", "gla", "sum"])
def test_normalisers_of_elu_features_may_be_as_small_as_the_precision_holds(name):
    """e^-80 for one key: with keys and queries of −40 each weight is known, and the rows add up to 1."""
    options = {"d": 2, "normalise": True} if name == "gla" else {}
    attend = h.build(name, **options)
    q, k, v = draw(1, 6, 2).float() - 40, draw(1, 6, 2, seed=1).float() - 40, draw(1, 6, 3, seed=2).float()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, want = attend(q, k, v), dense(h.build(name, **options).double(), *exact)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    grads, wanted = torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(want.sum(), exact)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)
    with torch.no_grad():
        if not hasattr(attend, "prefill"):
            return
        _, state = attend.prefill(q[:, :5], k[:, :5], v[:, :5])
        last, _ = attend.step(state, q[:, 5:], k[:, 5:], v[:, 5:])
        torch.testing.assert_close(last.double(), want[:, 5:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "retention", "favor+", "polynomial"])
def test_zero_heads_are_an_empty_batch(name):
    attend = h.build(name, **({"d": 4, "features": 8} if name == "favor+" else {}))
    q, k, v = torch.randn(2, 0, 5, 4), torch.randn(2, 0, 5, 4), torch.randn(2, 1, 5, 3)
    assert attend(q, k, v).shape == (2, 0, 5, 3)
    assert attend.prefill(q, k, v)[0].shape == (2, 0, 5, 3)


@pytest.mark.parametrize("pattern", [h.Full(), h.Causal()])
def test_no_tokens_of_width_zero_have_a_state_of_exponential_features(pattern):
    attend = h.build("favor+", d=4, features=8, pattern=pattern)
    q, v = torch.randn(2, 0, 4), torch.randn(2, 0, 0)
    assert attend(q, q, v).shape == attend(q, q, v, segments=torch.zeros(0, dtype=torch.long)).shape == (2, 0, 0)


def test_hedgehog_without_heads_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="heads: expected 1 or more, got 0"):
        h.Hedgehog(4, 0)
