"""Every check of the contract can fail: mechanisms with one fault each, and the checks that must reject them.

`Dense` and `Softmax` pass the whole suite, so it is the fault that is caught.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import heedful as h
from heedful.mechanisms.score_base import Cache
from heedful.segments import resolve, visible
from heedful.testing import CHECKS, Case, DoesNotApply, FlopCounter, UnknownOperation, check_mechanism, examine
from heedful.validation import check_inputs


class Dense(h.Mechanism):
    """Causal softmax attention by the whole matrix: slow, plain, right. Faults below override one part of it."""

    def __init__(self):
        super().__init__(h.Causal())

    def forward(self, q, k, v, *, segments=None):
        self.check(q, k, v, segments)
        scores = self.scores(q, k)
        sees = self.sees(q, k, segments)
        weights = self.weights(scores, sees, segments)
        return self.output(weights, v).to(q.dtype)

    def check(self, q, k, v, segments):
        check_inputs(q, k, v, segments=segments, pattern=self.pattern)

    def scores(self, q, k):
        wide = torch.promote_types(q.dtype, torch.float32)
        return q.to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5

    def sees(self, q, k, segments):
        return visible(self.pattern, q.shape[-2], k.shape[-2], segments, q.device)

    def weights(self, scores, sees, segments):
        scores = scores.masked_fill(~sees, -torch.inf)
        if not scores.shape[-1]:
            return scores
        weights = (scores - self.top(scores)).exp()
        total = weights.sum(-1, keepdim=True)
        return weights / total.masked_fill(total == 0, 1)

    def top(self, scores):
        top = scores.detach().amax(-1, keepdim=True)
        return top.masked_fill(top == -torch.inf, 0)

    def output(self, weights, v):
        return weights @ v.to(weights.dtype)

    def matrix(self, q, k, *, segments=None):
        return h.Softmax(self.pattern).matrix(q, k, segments=segments)

    def cost(self, dims):
        return h.Cost(2 * dims.batch * dims.n * dims.m * (dims.d + dims.e), dims.io_bytes)


# What is computed.


class TopLeft(Dense):
    """Query i of n sees keys 0 … i, also where there are more keys."""

    def sees(self, q, k, segments):
        if segments is not None:
            return super().sees(q, k, segments)
        return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()


class ClipsValues(Dense):
    def output(self, weights, v):
        return super().output(weights, v.clamp(-3, 3))


class WrongFromToken1024(Dense):
    """What a kernel does that forgets to reset something in its second thousand of tokens."""

    def output(self, weights, v):
        out = super().output(weights, v)
        late = torch.arange(weights.shape[-1] - out.shape[-2], weights.shape[-1])[:, None] >= 1024
        return torch.where(late, out * 1.01, out)


class WrongBeyond64Values(Dense):
    """The second block of value columns is computed from the first."""

    def output(self, weights, v):
        out = super().output(weights, v)
        return torch.cat([out[..., :64], out[..., : max(v.shape[-1] - 64, 0)]], -1)


class WrongAdjoint(h.Softmax):
    """The adjoint of the reversed sequence."""

    def products(self, q, k, *, segments=None):
        products = super().products(q, k, segments=segments)
        return products._replace(adjoint=lambda y: products.adjoint(y.flip(-2)))


class SumsAnotherMatrix(h.Softmax):
    """Rows of the reversed keys: as large in all, at other places."""

    def row_sums(self, q, k, request, *, segments=None):
        return super().row_sums(q, k.flip(-2), request, segments=segments)


class MaterialisesAnotherMatrix(h.Softmax):
    """A fast way to the matrix that forgets the segments."""

    def materialise(self, q, k, *, segments=None):
        return super().materialise(q, k)


class DetachesKeys(Dense):
    def scores(self, q, k):
        return super().scores(q, k.detach())


class DetachesItsParameter(h.Softmax):
    def __init__(self):
        super().__init__(sink=torch.nn.Parameter(torch.tensor([0.3, -0.2])))

    def forward(self, q, k, v, *, segments=None):
        return h.Softmax(self.pattern, sink=self.sink.detach())(q, k, v, segments=segments)


# Time.


class ClaimsToReadNothing(Dense):
    def reads_qk(self, heads):
        return (False,) * heads


class ForgetsTooEarly(h.Softmax):
    """A window's cache that is one key short."""

    def __init__(self):
        super().__init__(h.Window(5))

    def _forget(self, state):
        state = super()._forget(state)
        return Cache(*(x[..., -4:, :] for x in state[:2]), state.positions[..., -4:], state.length)


class ForgetsAfter1024Tokens(h.Softmax):
    """A cache that is cut at 1024 keys."""

    def _forget(self, state):
        state = super()._forget(state)
        return Cache(*(x[..., -1024:, :] for x in state[:2]), state.positions[..., -1024:], state.length)


class PrefillLosesAKey(h.Softmax):
    def prefill(self, q, k, v, *, segments=None):
        out, state = super().prefill(q, k, v, segments=segments)
        return out, Cache(*(x[..., :-1, :] for x in state[:2]), state.positions[..., :-1], state.length)


class PrefillKeepsPadding(h.Softmax):
    """The state is built as if the batch had no padding."""

    def prefill(self, q, k, v, *, segments=None):
        return self(q, k, v, segments=segments), super().prefill(q, k, v)[1]


class StepsInPlace(h.Softmax):
    """A step writes its key over the last one of the state that it was given."""

    def step(self, state, q, k, v):
        out, after = super().step(state, q, k, v)
        if state.k.shape[-2]:
            state.k[..., -1:, :] = k
        return out, after


class NormalisesOverTheFuture(Dense):
    def weights(self, scores, sees, segments):
        if segments is not None or not scores.numel():
            return super().weights(scores, sees, segments)
        return scores.softmax(-1) * sees


class LowersByTheFuture(Dense):
    """One maximum for all queries: right within rounding, but the past's last bits depend on what comes later."""

    def top(self, scores):
        return super().top(scores).amax(-2, keepdim=True) if scores.shape[-2] else super().top(scores)


# Batches.


class LowersByTheBatch(Dense):
    """One maximum for the whole batch: right within rounding, but the last bits depend on batch mates."""

    def top(self, scores):
        return super().top(scores).amax() if scores.numel() else super().top(scores)


class MasksOnlyValues(Dense):
    """Padding and other segments get no value but stay in the normaliser."""

    def weights(self, scores, sees, segments):
        if segments is None:
            return super().weights(scores, sees, segments)
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        return super().weights(scores, causal, None) * sees


class AbsolutePositions(Dense):
    """A window of five that counts across segments that interleave."""

    def __init__(self):
        super().__init__()
        self.pattern = h.Window(5)

    def sees(self, q, k, segments):
        if segments is None:
            return super().sees(q, k, None)
        layout = resolve(segments, q.shape[-2], k.shape[-2])
        same = layout.query_ids[..., None] == layout.key_ids[..., None, :]
        return same & (layout.query_ids[..., None] >= 0) & visible(self.pattern, q.shape[-2], k.shape[-2], None)


class HidesPaddingByAPenalty(Dense):
    """-50 instead of -inf: enough for ordinary padding, not for whatever else lies there."""

    def weights(self, scores, sees, segments):
        if segments is None:
            return super().weights(scores, sees, segments)
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        weights = super().weights(scores - 50.0 * ~sees, causal, None)
        return weights * sees.any(-1, keepdim=True)


class NeedsAKey(Dense):
    def weights(self, scores, sees, segments):
        assert scores.shape[-1], "a maximum over no keys"
        return super().weights(scores, sees, segments)


class NeedsATokenUnderSegments(Dense):
    """What `reshape(-1, n)` of the ids does."""

    def check(self, q, k, v, segments):
        super().check(q, k, v, segments)
        if isinstance(segments, torch.Tensor):
            segments.reshape(-1, segments.shape[-1])


class NeedsABatchUnderSegments(Dense):
    def check(self, q, k, v, segments):
        super().check(q, k, v, segments)
        if segments is not None and k.shape[-2]:
            k.amax()


class PrefillNeedsAToken(h.Softmax):
    def prefill(self, q, k, v, *, segments=None):
        assert segments is None or k.shape[-2], "no segment to go on with"
        return super().prefill(q, k, v, segments=segments)


class AdjointNeedsAQuery(h.Softmax):
    def products(self, q, k, *, segments=None):
        apply, adjoint = super().products(q, k, segments=segments)

        def of_some(y):
            assert y.shape[-2], "no row to start from"
            return adjoint(y)

        return apply, of_some


class ReadsMemoryInOrder(Dense):
    """What a kernel does that takes a pointer and forgets the strides."""

    def scores(self, q, k):
        if k.numel() and k.untyped_storage().nbytes() >= (k.storage_offset() + k.numel()) * k.element_size():
            strides = torch.empty(k.shape, device="meta").stride()
            k = k.as_strided(k.shape, strides)
        return super().scores(q, k)


class FlattensTheBatch(Dense):
    def scores(self, q, k):
        flat = super().scores(q.reshape(-1, *q.shape[-2:]), k.reshape(-1, *k.shape[-2:]))
        return flat.reshape(*q.shape[:-1], k.shape[-2])


# Arithmetic.


class AccumulatesInLowPrecision(Dense):
    def output(self, weights, v):
        out = v.new_zeros(*torch.broadcast_shapes(weights.shape[:-2], v.shape[:-2]), weights.shape[-2], v.shape[-1])
        for j in range(v.shape[-2]):
            out = out + weights[..., j : j + 1].to(v.dtype) * v[..., j : j + 1, :]
        return out


class ComputesIn16Bits(Dense):
    """16-bit arithmetic throughout, in the definition too, so that both agree."""

    kind = torch.bfloat16
    of = (torch.float32, torch.float64)

    def scores(self, q, k):
        if q.dtype not in self.of:
            return super().scores(q, k)
        return (q.to(self.kind) @ k.to(self.kind).mT * q.shape[-1] ** -0.5).to(q.dtype)

    def output(self, weights, v):
        return super().output(weights.to(self.kind).to(weights.dtype) if v.dtype in self.of else weights, v)

    def matrix(self, q, k, *, segments=None):
        check_inputs(q, k, segments=segments, pattern=self.pattern)
        weights = self.weights(self.scores(q, k), self.sees(q, k, segments), segments)
        return weights.to(self.kind if q.dtype in self.of else q.dtype).to(q.dtype)


class ComputesFloat32In16Bits(ComputesIn16Bits):
    """As a fast path for float32 may; float64 is right."""

    kind = torch.float16
    of = (torch.float32,)


class ReturnsFloat32(Dense):
    def forward(self, q, k, v, *, segments=None):
        out = super().forward(q, k, v, segments=segments)
        return out.float() if out.dtype == torch.bfloat16 else out


class RoundsItsAdjoint(h.Softmax):
    """Weights rounded to a few bits in the adjoint alone."""

    def products(self, q, k, *, segments=None):
        apply, _ = super().products(q, k, segments=segments)
        weights = self.matrix(q, k, segments=segments).mT
        step = 16 * torch.finfo(q.dtype).eps
        return apply, lambda y: (weights / step).round() * step @ y


class DriftsStepByStep(h.Softmax):
    """A state that is rounded a little at every step, as one kept in low precision is."""

    def step(self, state, q, k, v):
        out, (keys, values, *rest) = super().step(state, q, k, v)
        return out, Cache(keys, values * (1 + 0.5 * torch.finfo(v.dtype).eps), *rest)


class ScalesInPlace(Dense):
    def scores(self, q, k):
        q.data.mul_(q.shape[-1] ** -0.5)
        wide = torch.promote_types(q.dtype, torch.float32)
        return q.to(wide) @ k.to(wide).mT


class NoMaximum(Dense):
    def top(self, scores):
        return torch.zeros(())


class ClipsScores(Dense):
    def scores(self, q, k):
        return super().scores(q, k).clamp(-80, 80)


class LowersByTheLargestSoFar(Dense):
    """The maximum of all rows so far: finite whatever the scores, but rows far below an earlier one are zero."""

    def top(self, scores):
        return super().top(scores).cummax(-2).values if scores.shape[-2] else super().top(scores)


class NaNOnMaskedRows(Dense):
    def weights(self, scores, sees, segments):
        return scores.masked_fill(~sees, -torch.inf).softmax(-1) if scores.shape[-1] else scores


class CutsTheGraph(Dense):
    """Fresh zeros where no query sees a key: the right numbers, and a backward pass that raises."""

    def forward(self, q, k, v, *, segments=None):
        out = super().forward(q, k, v, segments=segments)
        return out if self.sees(q, k, segments).any() else torch.zeros_like(out)


class CutsTheGraphOfQueries(Dense):
    """The same, but the zeros depend on the values, so that only queries and keys are cut off."""

    def forward(self, q, k, v, *, segments=None):
        out = super().forward(q, k, v, segments=segments)
        return out if self.sees(q, k, segments).any() else out.detach() + 0 * v.sum((-2, -1), keepdim=True)


class SumsRowsOverNothing(h.Softmax):
    """NaN in the sums over rows where no query sees a key, as a mean over nothing gives."""

    def row_sums(self, q, k, request, *, segments=None):
        sums = super().row_sums(q, k, request, segments=segments)
        return replace(sums, total=sums.total / sums.count.any())


class LeavesPaddingUnwritten(Dense):
    def forward(self, q, k, v, *, segments=None):
        out = super().forward(q, k, v, segments=segments)
        if segments is None:
            return out
        real = resolve(segments, q.shape[-2], k.shape[-2]).query_ids >= 0
        return torch.where(real[..., None], out, torch.empty_like(out))


# Costs.


class ClaimsAThird(Dense):
    def cost(self, dims):
        return h.Cost(super().cost(dims).flops // 3, dims.io_bytes)


class ClaimsThreeFifths(Dense):
    def cost(self, dims):
        return h.Cost(super().cost(dims).flops * 3 // 5, dims.io_bytes)


class ClaimsThrice(Dense):
    def cost(self, dims):
        return h.Cost(super().cost(dims).flops * 3, dims.io_bytes)


class ClaimsLinearGrowth(Dense):
    """Right at one length, wrong in its growth."""

    def cost(self, dims):
        return h.Cost(2 * dims.batch * dims.n * 1500 * (dims.d + dims.e), dims.io_bytes)


class ConfusesWidths(Dense):
    def cost(self, dims):
        return h.Cost(2 * dims.batch * dims.n * dims.m * 2 * dims.d, dims.io_bytes)


class UsesAnUncountedOperation(Dense):
    def output(self, weights, v):
        return super().output(weights, torch.fft.ifft(torch.fft.fft(v, dim=-1), dim=-1).real)


class CountsFewBytes(Dense):
    """The size of a number was left out."""

    def cost(self, dims):
        return h.Cost(super().cost(dims).flops, dims.io_bytes // dims.itemsize)


class CountsFractions(Dense):
    def cost(self, dims):
        return h.Cost(super().cost(dims).flops / 1, dims.io_bytes)


class CountsAStateOfOneHead(h.Softmax):
    def cost(self, dims):
        cost = super().cost(dims)
        return h.Cost(cost.flops, cost.bytes, cost.state // dims.batch)


class CountsSharedKeysForEachHead(h.Softmax):
    """Bytes and state as if each query head had keys and values of its own."""

    def cost(self, dims):
        return super().cost(replace(dims, group_size=1))


class KeepsAStateForEachQueryHead(h.Linear):
    """The sums of shared keys, once for each query head that reads them."""

    def init_state(self, q, k, v):
        batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
        return super().init_state(q, k.expand(*batch, *k.shape[-2:]), v)


class ClaimsAState(Dense):
    """A state without a recurrence."""

    def cost(self, dims):
        return h.Cost(super().cost(dims).flops, dims.io_bytes, state=0)


# Manners.


class DiffersWhenCompiled(Dense):
    def output(self, weights, v):
        return super().output(weights, v * 0.99 if torch.compiler.is_compiling() else v)


class HoldsALooseTensor(Dense):
    def __init__(self):
        super().__init__()
        self.gain = torch.rand(())

    def scores(self, q, k):
        return super().scores(q, k) * self.gain

    def matrix(self, q, k, *, segments=None):
        return super().matrix(q * self.gain.to(q.dtype), k, segments=segments)


class HoldsALambda(Dense):
    def __init__(self):
        super().__init__()
        self.activation = lambda x: x


class DropsInTraining(Dense):
    def output(self, weights, v):
        return super().output(torch.nn.functional.dropout(weights, 0.1, self.training), v)


class DrawsAtEachCall(Dense):
    def output(self, weights, v):
        return super().output(weights, v) * (1 + 1e-3 * torch.rand(()))


class ChecksNothing(Dense):
    def check(self, q, k, v, segments):
        pass


class SaysLittle(Dense):
    def check(self, q, k, v, segments):
        try:
            super().check(q, k, v, segments)
        except (ValueError, TypeError):
            raise ValueError("shapes do not match") from None


class IgnoresCheckFinite(Dense):
    def check(self, q, k, v, segments):
        with h.check_finite(False):
            super().check(q, k, v, segments)


FAULTS: dict[type[h.Mechanism], set[str]] = {
    TopLeft: {"forward_is_matrix_times_v", "operator_is_the_matrix"},
    ClipsValues: {"outputs_add_up_with_the_values"},
    WrongFromToken1024: {"forward_is_matrix_times_v"},
    WrongBeyond64Values: {"forward_is_matrix_times_v"},
    WrongAdjoint: {"operator_is_the_matrix"},
    SumsAnotherMatrix: {"operator_is_the_matrix"},
    MaterialisesAnotherMatrix: {"operator_is_the_matrix"},
    DetachesKeys: {"gradients_are_those_of_the_matrix"},
    DetachesItsParameter: {"gradients_are_those_of_the_matrix"},
    ClaimsToReadNothing: {"unread_queries_and_keys_have_no_say"},
    ForgetsTooEarly: {"steps_replay_forward", "prefill_then_steps_is_the_whole", "state_is_what_cost_says"},
    ForgetsAfter1024Tokens: {"prefill_then_steps_is_the_whole"},
    PrefillLosesAKey: {"prefill_then_steps_is_the_whole", "state_is_what_cost_says"},
    PrefillKeepsPadding: {"padded_prefill_then_steps_is_each_sequence"},
    StepsInPlace: {"steps_replay_forward"},
    NormalisesOverTheFuture: {"forward_is_matrix_times_v", "future_leaves_the_past_alone"},
    LowersByTheFuture: {"future_leaves_the_past_alone"},
    LowersByTheBatch: {"batch_mates_are_independent", "future_leaves_the_past_alone"},
    MasksOnlyValues: {"padded_and_packed_equal_separate", "padding_has_no_say"},
    AbsolutePositions: {"padded_and_packed_equal_separate"},
    HidesPaddingByAPenalty: {"padding_has_no_say"},
    NeedsAKey: {"empty_sequences_work"},
    NeedsATokenUnderSegments: {"empty_sequences_work"},
    NeedsABatchUnderSegments: {"empty_sequences_work"},
    PrefillNeedsAToken: {"empty_sequences_work"},
    AdjointNeedsAQuery: {"empty_sequences_work"},
    ReadsMemoryInOrder: {"strides_do_not_matter"},
    FlattensTheBatch: {"batch_axes_broadcast"},
    AccumulatesInLowPrecision: {"precision_is_no_worse_than_naive"},
    ComputesIn16Bits: {"arithmetic_is_that_of_the_inputs"},
    ComputesFloat32In16Bits: {"arithmetic_is_that_of_the_inputs"},
    ReturnsFloat32: {"precision_is_no_worse_than_naive"},
    RoundsItsAdjoint: {"products_and_steps_are_as_precise"},
    DriftsStepByStep: {"products_and_steps_are_as_precise"},
    ScalesInPlace: {"inputs_are_left_alone"},
    NoMaximum: {"large_logits_are_right"},
    ClipsScores: {"large_logits_are_right"},
    LowersByTheLargestSoFar: {"large_logits_are_right"},
    NaNOnMaskedRows: {"masked_rows_are_zero", "padded_and_packed_equal_separate"},
    CutsTheGraph: {"masked_rows_are_zero", "empty_sequences_work"},
    CutsTheGraphOfQueries: {"masked_rows_are_zero"},
    SumsRowsOverNothing: {"masked_rows_are_zero"},
    LeavesPaddingUnwritten: {"every_output_is_written"},
    ClaimsAThird: {"flops_are_what_cost_says"},
    ClaimsThreeFifths: {"flops_are_what_cost_says"},
    ClaimsThrice: {"flops_are_what_cost_says"},
    ClaimsLinearGrowth: {"flops_are_what_cost_says"},
    ConfusesWidths: {"flops_are_what_cost_says"},
    UsesAnUncountedOperation: {"flops_are_what_cost_says"},
    CountsFewBytes: {"bytes_cover_the_inputs"},
    CountsFractions: {"bytes_cover_the_inputs"},
    CountsAStateOfOneHead: {"state_is_what_cost_says"},
    ClaimsAState: {"state_is_what_cost_says"},
    CountsSharedKeysForEachHead: {"bytes_cover_the_inputs", "state_is_what_cost_says"},
    KeepsAStateForEachQueryHead: {"state_is_what_cost_says"},
    DiffersWhenCompiled: {"compiled_equals_eager"},
    HoldsALooseTensor: {"state_dict_holds_everything"},
    HoldsALambda: {"copies_agree"},
    DropsInTraining: {"calls_repeat"},
    DrawsAtEachCall: {"calls_repeat"},
    ChecksNothing: {"bad_input_is_named", "non_finite_input_is_named"},
    SaysLittle: {"bad_input_is_named", "non_finite_input_is_named"},
    IgnoresCheckFinite: {"non_finite_input_is_named"},
}
"""Each fault with the checks that must reject it (others may, too)."""


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        pytest.param(fault, check, id=f"{fault.__name__}-{check}")
        for fault, checks in FAULTS.items()
        for check in CHECKS
        if check in checks
    ],
)
def test_a_planted_fault_is_caught(fault, check):
    outcome = examine(Case(fault), [check]).outcomes[check]
    assert outcome.verdict == "failed", f"{fault.__name__} got through: {outcome}"


SPARSE = [entry for entry in h.CATALOG.values() if "sparse" in entry.family or entry.family == "combinations"]


@pytest.mark.parametrize("entry", SPARSE, ids=lambda entry: entry.name)
def test_a_cost_of_three_fifths_is_caught_where_tiles_hold_more_than_the_pattern(entry):
    facts = {"d": 8, "heads": 2, "length": 2048}
    mechanism = entry.build(**{name: fact for name, fact in facts.items() if name in entry.options})
    right = mechanism.cost
    mechanism.cost = lambda dims: h.Cost(right(dims).flops * 3 // 5, dims.io_bytes)
    with pytest.raises(AssertionError, match=r"cost\.flops at"):
        CHECKS["flops_are_what_cost_says"](Case(lambda: mechanism))


def test_every_check_catches_some_fault():
    assert set().union(*FAULTS.values()) == set(CHECKS)


def test_what_the_faults_are_planted_in_passes():
    report = check_mechanism(Dense)
    assert report.passed
    assert "steps_replay_forward" in report.names("does not apply")
    assert "Dense" in repr(report) and "is no RecurrentMechanism" in repr(report)


def test_one_error_lists_every_broken_law():
    with pytest.raises(AssertionError) as caught:
        check_mechanism(SaysLittle, checks=["bad_input_is_named", "non_finite_input_is_named", "copies_agree"])
    text = str(caught.value)
    assert "breaks 2 of 3 laws" in text
    assert "bad_input_is_named" in text and "non_finite_input_is_named" in text and "copies_agree" not in text


def test_an_instance_is_copied_and_left_alone():
    mine = h.Softmax(sink=torch.zeros(2))
    check_mechanism(mine, checks=["precision_is_no_worse_than_naive", "copies_agree"])
    assert mine.sink.dtype == torch.float32 and mine.training


def test_a_wrong_name_and_a_wrong_builder_are_refused():
    with pytest.raises(ValueError, match="no check is called typo"):
        check_mechanism(Dense, checks=["typo"])
    with pytest.raises(TypeError, match="build"):
        check_mechanism(lambda: 3)


def test_a_check_that_says_nothing_about_a_mechanism_says_so():
    with pytest.raises(DoesNotApply, match="later keys"):
        CHECKS["future_leaves_the_past_alone"](Case(h.Softmax(h.Full())))


def test_the_flop_counter_counts_products_and_refuses_what_it_does_not_know():
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    with FlopCounter() as counter:
        torch.relu(a @ b).sum(-1).exp_()
        torch.cumsum(a, -1)
        torch.baddbmm(torch.zeros(2, 3, 5), a, b)
    assert counter.flops == 2 * (2 * 2 * 3 * 4 * 5) + 24
    q = torch.randn(1, 2, 10, 8)
    for causal, pairs in ((False, 100), (True, 55)):
        with FlopCounter() as counter:
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal)
        assert counter.flops == 2 * 2 * pairs * 16
    with pytest.raises(UnknownOperation, match="aten::_fft_r2c"), FlopCounter():
        torch.fft.fft(a)
    with FlopCounter({"aten::_fft_r2c": lambda x, *_: x.numel()}) as counter:
        torch.fft.fft(a)
    assert counter.flops == 24
