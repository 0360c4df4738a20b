"""The contract as a test suite: `check_mechanism` tests any mechanism, also one outside this package.

    algebra      fast path, operator and gradients agree with the matrix
    streaming    steps reproduce `forward`, and later tokens do not change earlier outputs
    batches      other batch entries, padding, packing, strides and broadcast axes do not change a result
    arithmetic   low precision, large logits, empty rows, uninitialised memory
    costs        flops, bytes and state agree with `cost`
    manners      compiling, copying, repeated calls, and error messages

Each check is one function of a `Case`, named by the law that it tests. `CHECKS` lists them in order, so that pytest can
run one test per mechanism and law:

    @pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
    def test_mine(check):
        try:
            check(Case(Mine))
        except DoesNotApply as why:
            pytest.skip(str(why))
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from heedful.core import Mechanism
from heedful.testing import algebra, arithmetic, batches, costs, manners, streaming
from heedful.testing.case import Case, DoesNotApply
from heedful.testing.flops import FlopCounter, UnknownOperation

__all__ = [
    "CHECKS",
    "Case",
    "DoesNotApply",
    "FlopCounter",
    "Outcome",
    "Report",
    "UnknownOperation",
    "check_mechanism",
    "examine",
]

CHECKS: dict[str, Callable[[Case], None]] = {
    check.__name__: check
    for check in (
        algebra.forward_is_matrix_times_v,
        algebra.outputs_add_up_with_the_values,
        algebra.operator_is_the_matrix,
        algebra.gradients_are_those_of_the_matrix,
        algebra.unread_queries_and_keys_have_no_say,
        streaming.steps_replay_forward,
        streaming.prefill_then_steps_is_the_whole,
        streaming.padded_prefill_then_steps_is_each_sequence,
        streaming.future_leaves_the_past_alone,
        batches.batch_mates_are_independent,
        batches.padded_and_packed_equal_separate,
        batches.padding_has_no_say,
        batches.empty_sequences_work,
        batches.strides_do_not_matter,
        batches.batch_axes_broadcast,
        arithmetic.precision_is_no_worse_than_naive,
        arithmetic.products_and_steps_are_as_precise,
        arithmetic.arithmetic_is_that_of_the_inputs,
        arithmetic.inputs_are_left_alone,
        arithmetic.large_logits_are_right,
        arithmetic.masked_rows_are_zero,
        arithmetic.every_output_is_written,
        costs.flops_are_what_cost_says,
        costs.bytes_cover_the_inputs,
        costs.state_is_what_cost_says,
        manners.compiled_equals_eager,
        manners.state_dict_holds_everything,
        manners.copies_agree,
        manners.calls_repeat,
        manners.bad_input_is_named,
        manners.non_finite_input_is_named,
    )
}


@dataclass(frozen=True)
class Outcome:
    """The verdict of one check, its time in seconds, and the reason if it did not pass.

    >>> import heedful as h
    >>> report = h.testing.examine(h.testing.Case(h.Softmax), checks=["calls_repeat"])
    >>> report.outcomes["calls_repeat"].verdict
    'passed'
    """

    verdict: Literal["passed", "failed", "does not apply"]
    seconds: float
    why: str = ""


@dataclass(frozen=True, repr=False)
class Report:
    """The outcomes of all checks, in order; see `examine`.

    >>> import heedful as h
    >>> report = h.testing.examine(h.testing.Case(h.Softmax), checks=["inputs_are_left_alone", "calls_repeat"])
    >>> report.passed, report.names("failed")
    (True, [])
    """

    mechanism: str
    outcomes: dict[str, Outcome]

    def names(self, verdict: str) -> list[str]:
        """Return the names of the checks with this verdict."""
        return [name for name, outcome in self.outcomes.items() if outcome.verdict == verdict]

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.names("failed")

    def __repr__(self) -> str:
        width = max(map(len, self.outcomes), default=0)
        counts = ", ".join(f"{len(self.names(v))} {v}" for v in ("passed", "failed", "does not apply"))
        lines = [f"{self.mechanism}: {counts} in {sum(o.seconds for o in self.outcomes.values()):.1f} s"]
        for name, outcome in self.outcomes.items():
            lines.append(f"  {name:<{width}}  {outcome.verdict}{f': {outcome.why}' if outcome.why else ''}")
        return "\n".join(lines)


def check_mechanism(
    build: Callable[[], Mechanism] | Mechanism,
    *,
    d: int = 8,
    e: int = 6,
    heads: int = 2,
    length: int = 2048,
    large: Callable[[], Mechanism] | Mechanism | None = None,
    checks: Iterable[str] | None = None,
) -> Report:
    """Test a mechanism against the whole contract; raise an AssertionError that lists every law it breaks.

    A complete mechanism in thirty lines::

        import torch

        import heedful as h
        from heedful.validation import check_inputs
        from heedful.segments import per_segment, visible
        from heedful.testing import check_mechanism


        class PrefixMean(h.Mechanism):
            '''Every query gets the mean of the values so far: A_ij = 1 / (number of j ≤ i).'''

            def __init__(self):
                super().__init__(h.Causal())

            def forward(self, q, k, v, *, segments=None):
                check_inputs(q, k, v, segments=segments, pattern=self.pattern)
                if segments is not None:
                    return per_segment(self, q, k, v, segments)
                n, m = q.shape[-2], k.shape[-2]
                batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
                wide = torch.promote_types(v.dtype, torch.float32)  # long sums need more than bfloat16
                count = torch.arange(1, m + 1, device=v.device, dtype=wide)[:, None]
                mean = (v.to(wide).cumsum(-2) / count).to(v.dtype)
                return mean[..., m - n :, :].expand(*batch, n, v.shape[-1])

            def matrix(self, q, k, *, segments=None):
                check_inputs(q, k, segments=segments, pattern=self.pattern)
                sees = visible(self.pattern, q.shape[-2], k.shape[-2], segments, q.device).to(q.dtype)
                batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
                return (sees / sees.sum(-1, keepdim=True).clamp(min=1)).expand(*batch, *sees.shape[-2:])

            def cost(self, dims):
                return h.Cost(flops=dims.kv_batch * dims.m * dims.e, bytes=dims.io_bytes)


        print(check_mechanism(PrefixMean))

    `heedful.RecurrentMechanism` has a complete example that decodes token by token, and explains the helpers. To run
    only some of the checks:

    >>> import heedful as h
    >>> h.testing.check_mechanism(h.Softmax, checks=["calls_repeat", "forward_is_matrix_times_v"]).passed
    True

    build         a function without arguments (such as the class), or an instance, which is copied. Its type decides
                  which checks apply: steps for a `RecurrentMechanism`, causality if `mechanism.pattern.is_causal`. The
                  report says which checks did not apply and why
    d, e, heads   widths of keys and values and number of heads, if the mechanism needs certain ones
    length        the longest sequence that it takes; no check uses a longer one, and costs are checked at this length
    large         builds the mechanism with options for sequences of that length, if `build` returns a small one: a
                  window of 5 keys is good for most tests, but its cost would not match kernels with larger tiles
    checks        names from `CHECKS`; all by default
    """
    report = examine(Case(build, d, e, heads, length, large), checks)
    if not report.passed:
        broken = [f"{name}: {report.outcomes[name].why}" for name in report.names("failed")]
        raise AssertionError(
            f"{report.mechanism} breaks {len(broken)} of {len(report.outcomes)} laws of the contract:\n\n"
            + "\n\n".join(broken)
        )
    return report


def examine(case: Case, checks: Iterable[str] | None = None) -> Report:
    """Run the checks in order and return a report; a failed check does not raise.

    >>> import heedful as h
    >>> h.testing.examine(h.testing.Case(h.Softmax), checks=["inputs_are_left_alone", "calls_repeat"]).passed
    True
    """
    chosen = list(CHECKS if checks is None else checks)
    if unknown := [name for name in chosen if name not in CHECKS]:
        raise ValueError(
            f"checks: no check is called {', '.join(unknown)}; expected names from heedful.testing.CHECKS."
        )
    return Report(repr(case.mechanism()), {name: _outcome(CHECKS[name], case) for name in chosen})


def _outcome(check: Callable[[Case], None], case: Case) -> Outcome:
    start = time.perf_counter()
    verdict: Literal["passed", "failed", "does not apply"] = "passed"
    why = ""
    try:
        check(case)
    except DoesNotApply as reason:
        verdict, why = "does not apply", str(reason)
    except AssertionError as error:
        verdict, why = "failed", str(error)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        verdict, why = "failed", f"{type(error).__name__} in {frame.filename}:{frame.lineno} ({frame.line}): {error}"
    return Outcome(verdict, time.perf_counter() - start, why)
