"""Random calls of every entry of the catalogue, compared with the definition in float64.

    python benchmarks/fuzz.py --calls 100000 --seed 0 --workers 2
    python benchmarks/fuzz.py --calls 5000 --device cuda --seconds 900
    python benchmarks/fuzz.py --only 0:1234          one call, with everything about it
    python benchmarks/fuzz.py --of fuzz-*.jsonl --summary fuzz.json          a summary of several runs

A call draws an entry and its options, lengths and widths (0, 1, odd ones, rarely 1000), batch axes that broadcast,
padding, packing or pairs of segments, a dtype, the size of the logits (up to 10⁴), memory layouts, and which inputs
require a gradient. It runs `forward` and, at random, the backward pass, the operator's products, and prefill with a few
steps.

The oracle is matrix(q, k) @ v in float64 on the same rounded inputs. A result is judged by three rules, in this order;
the summary counts the calls that needed the second or the third.
naive       in float64, the tolerance that `heedful.testing` derives; in a lower precision, at most twice the error of
            matrix(q, k) @ v in that precision, or the minimal tolerance of `precision_is_no_worse_than_naive`.
neighbours  the same, with the largest naive error of this input and of 8 inputs that differ by one rounding, and with
            the change of the definition when the inputs are rounded to float32. A result of a few numbers is sometimes
            exact by luck, and no algorithm can be more accurate than the rounding of its inputs.
rounding    the error that float32 can't avoid: ε (√terms + exponent) times the size of the terms of a sum.
            - Terms may cancel: those of a gradient, (g·v_j − g·o_i) ∂log w_ij, and those of a normaliser of signed
              features. A sum has a rounding error relative to its terms, not to itself.
            - A score s has error ε·s, so exp(s) has relative error ε·s (as in `large_logits_are_right`).
            In float64 the same, times the factor 32 of the suite's tolerance, and with terms instead of √terms.

On a GPU, calls of elu + 1 whose normalisers may be below 2^-95 are skipped and counted: the kernels treat such a row as
empty.

A ValueError or TypeError that says what was expected is a refusal; the summary lists refusals by message. Everything
else is a failure, with a reproducer. Results are appended to --out as they come, one JSON line per call; the same
command continues where it stopped. Exits with 1 if a call failed.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import platform
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import log
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch

import heedful as h
from heedful.core import Mechanism, RecurrentMechanism
from heedful.feature_maps import FeatureMap, LogFeatureMap
from heedful.kernels.chunked_linear.chunks import CHUNK
from heedful.kernels.chunked_linear.groups import LEAST
from heedful.kernels.iterated_inverse import iterated_inverse
from heedful.mechanisms.linear_base import LinearBase
from heedful.mechanisms.nystrom import Nystrom, landmarks
from heedful.random_features.maps import RandomFeatures
from heedful.segments import Segments, allowed, from_lengths, resolve
from heedful.shapes import Tensor, broadcast_shapes
from heedful.testing.arithmetic import _assert_precise
from heedful.testing.case import Oracle, assert_agrees, dense, oracles

LENGTHS = {0: 2, 1: 6, 2: 6, 3: 6, 5: 8, 8: 8, 15: 6, 16: 6, 17: 6, 31: 6, 33: 6, 63: 4, 64: 4, 65: 4, 100: 3, 127: 2}
LONG = 1000  # once in 500 calls
WIDTHS = {1: 3, 2: 4, 3: 4, 5: 6, 8: 10, 16: 10, 17: 4, 32: 6, 64: 4, 65: 1, 128: 1}
DTYPES = {torch.float64: 3, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
LOGITS = {0.1: 2, 1.0: 10, 10.0: 3, 100.0: 2, 1e3: 1, 1e4: 1}
NEIGHBOURS = 8
"""Number of inputs, one rounding apart, used to estimate the naive error."""


class Failed(AssertionError):
    """A result that no rule explains."""


@dataclass
class Call:
    """The parts of one call; `about` describes it for a reader."""

    entry: str
    options: dict[str, Any]
    mechanism: Mechanism
    q: Tensor
    k: Tensor
    v: Tensor
    segments: Segments | None
    wants: tuple[str, ...]
    learns: bool
    about: dict[str, Any] = field(default_factory=dict)


def pick(random: Random, weights: dict[Any, float]) -> Any:
    return random.choices(list(weights), list(weights.values()))[0]


# ---- drawing


def draw(seed: int, call: int) -> Iterator[Call]:
    """Yield the call with this number, first partial, then complete: if building it is refused, the caller has a
    description.
    """
    random = Random(f"{seed}:{call}")
    generator = torch.Generator().manual_seed(random.getrandbits(40))
    name = random.choice(list(h.CATALOG))
    entry = h.CATALOG[name]
    long = random.random() < 1 / 500
    m = LONG if long else pick(random, LENGTHS)
    n = m if random.random() < 0.7 else pick(random, LENGTHS) if random.random() < 0.3 else random.randint(min(1, m), m)
    d, e = pick(random, WIDTHS), pick(random, {**WIDTHS, 0: 1, 100: 1})
    d = min(d, 16) if name in ("polynomial", "taylor") else 0 if random.random() < 0.003 else d
    batch = (
        []
        if long
        else [pick(random, {1: 3, 2: 6, 3: 3, 0: 0.1}) for _ in range(pick(random, {0: 1, 1: 3, 2: 5, 3: 2}))]
    )
    axes = [_some_axes(random, batch) for _ in range(3)]
    whole = broadcast_shapes(*(tuple(one) for one in axes))
    dtype, logits = pick(random, DTYPES), pick(random, LOGITS)
    about = {"n": n, "m": m, "d": d, "e": e, "axes": axes, "dtype": str(dtype)[6:], "logits": logits}
    options = _options(random, entry.build, {"d": d, "heads": whole[-1] if whole else 1, "length": max(m, n, 1)})
    yield Call(name, options, None, None, None, None, None, (), False, about)  # type: ignore[arg-type]

    torch.manual_seed(call)
    mechanism = entry.build(**options).to(dtype).eval()
    spread = (logits / 3) ** 0.5
    sizes = ((n, d, spread), (m, d, spread), (m, e, 1.0))
    tensors = []
    for axis, (length, width, size) in zip(axes, sizes, strict=True):
        x = torch.randn(*axis, length, width, generator=generator, dtype=torch.float64) * size
        tensors.append(_laid_out(random, (x + (random.random() < 0.2)).to(dtype) if size == 1.0 else x.to(dtype)))
    lead = broadcast_shapes(tuple(axes[0]), tuple(axes[1]))
    segments = _segments(random, generator, n, m, lead)
    wants = tuple(name for name in "qkv" if random.random() < 0.7) if random.random() < 0.6 else ()
    about |= {"segments": _told(segments), "wants": "".join(wants), "strides": [tuple(x.stride()) for x in tensors]}
    learns = bool(wants) and random.random() < 0.4
    yield Call(name, options, mechanism, *tensors, segments, wants, learns, about)  # type: ignore[arg-type]


def _some_axes(random: Random, batch: list[int]) -> list[int]:
    """Batch axes that broadcast to `batch`: some of size 1, some leading ones left out."""
    axes = [1 if random.random() < 0.15 else size for size in batch]
    return axes[random.randint(0, len(axes)) :] if random.random() < 0.15 else axes


def _options(random: Random, build: Callable[..., Mechanism], facts: dict[str, int]) -> dict[str, Any]:
    small = partial(random.randint, 1)
    makes: dict[str, Callable[[], Any]] = {
        "pattern": lambda: _pattern(random, build),
        "scale": lambda: random.choice([None, 0.3, 1.0]),
        "temperature": lambda: random.choice([1.0, 0.5, 3.0]),
        "softcap": lambda: random.choice([None, None, 2.0, 30.0]),
        "sink": lambda: random.choice([None, None, torch.nn.Parameter(torch.tensor(0.5))]),
        "bias": lambda: random.choice([None, None, distance]),
        "causal": lambda: random.random() < 0.5,
        "normalise": lambda: random.random() < 0.5,
        "shared": lambda: random.random() < 0.5,
        "hyperbolic": lambda: random.random() < 0.3,
        "gate": lambda: random.choice(["channel", "head"]),
        "projection": lambda: random.choice(["learned", "pooled", "random"]),
        "edge": lambda: "last",
        "kind": lambda: random.choice(
            ["sderf", "aderf", "saderf"]
            if "window" not in inspect.signature(build).parameters
            else ["favor+", "favor++", "favor#"]
        ),
        "seed": lambda: random.randint(0, 9),
        "decay": lambda: random.choice([0.5, 0.9, 0.999, 1.0]),
        "tau": lambda: random.choice([1.0, 16.0]),
        "rounds": lambda: small(3),
        "radius": lambda: random.randint(0, 4),
        "tokens": lambda: tuple(random.sample(range(9), random.randint(0, 3))),
        "features": lambda: random.choice([1, 2, 4, 16, 33, 64]),
        "sinks": lambda: random.randint(0, 4),
        "after": lambda: random.randint(0, 6),
        "before": lambda: random.choice([0, 1, 5, 16, 70]),
        "window": lambda: random.choice([1, 2, 4, 6, 16, 70]),
        "summary": lambda: 1,
        "gap": lambda: small(5),
        "random": lambda: small(2),
        **{name: lambda: random.choice([1, 2, 3, 4, 8, 16, 33]) for name in ("size", "stride", "k", "landmarks")},
        "rank": lambda: min(random.choice([1, 2, 4, 8, 16, 33]), facts["length"]),
        "latents": lambda: random.choice([1, 4, 8, 33]),
        "inner": lambda: random.choice([None, h.Softmax(h.Full())]),
    }
    asked = inspect.signature(build).parameters
    options = {name: facts[name] for name in asked if name in facts}
    return options | {name: makes[name]() for name in asked if name in makes and name not in options}


def distance(i: Tensor, j: Tensor) -> Tensor:
    return -0.2 * (i - j).abs()


def _pattern(random: Random, build: Callable[..., Mechanism]) -> h.patterns.Pattern:
    made = str(inspect.signature(build).return_annotation)
    if build is h.Nystrom and random.random() < 0.95:  # mostly options that it accepts; refusals are tried now and then
        return h.Full()
    if random.random() < (0.95 if "Linear" in made or "LowRank" in made else 0.5):
        return random.choice([h.Causal(), h.Full()])
    simple = [
        h.Window(random.randint(0, 20), random.randint(0, 9), random.randint(0, 3)),
        h.Blocks(random.randint(1, 20)),
        h.Strided(random.randint(1, 9)),
        h.Global(tuple(random.sample(range(20), 2))),
        h.RandomBlocks(random.randint(1, 9), random.randint(1, 2), random.randint(0, 5)),
        h.SparseFixed(4, 1),
    ]
    one, other = random.sample(simple, 2)
    return random.choice([one, one | other, one & h.Causal(), (one | other) & h.Causal()])


def _segments(random: Random, generator: torch.Generator, n: int, m: int, batch: tuple[int, ...]) -> Segments | None:
    kind = pick(random, {"none": 5, "right": 1, "left": 1, "packed": 1, "mixed": 1, "pair": 0.7, "padding": 0.2})
    lead = tuple(size if random.random() < 0.6 else 1 for size in batch) if random.random() < 0.7 else ()
    if kind == "none" or (n > m and kind != "pair"):
        return None

    def randint(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (*lead, *shape), generator=generator)

    if kind in ("right", "left"):
        return from_lengths(randint(0, m + 1), m, padding=kind)
    if kind == "packed":
        return randint(0, 2, m).mul(randint(0, 2, m)).cumsum(-1) - int(random.random() < 0.2)
    if kind == "mixed":
        return randint(-1, 3, m)
    if kind == "padding":
        return torch.full((*lead, m), -1)
    return randint(-1, 3, n), randint(-1, 3, m)


def _laid_out(random: Random, x: Tensor) -> Tensor:
    """The same numbers in another memory layout."""
    way = pick(random, {"plain": 6, "tokens first": 1, "width first": 1, "every second": 1, "offset": 1})
    if way == "tokens first":
        return x.movedim(-2, 0).contiguous().movedim(0, -2)
    if way == "width first":
        return x.mT.contiguous().mT
    if way == "every second":
        return torch.stack([x, x], -2).flatten(-3, -2)[..., ::2, :]
    if way == "offset":
        return torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]]
    return x


def _told(segments: Segments | None) -> str:
    if segments is None:
        return "none"
    return "pair" if isinstance(segments, tuple) else f"{tuple(segments.shape)}"


# ---- running


def run(seed: int, call: int, device: str = "cpu") -> dict[str, Any]:
    """One line of the results."""
    made = None
    start = time.process_time()
    line: dict[str, Any] = {"call": call, "verdict": "ok"}
    try:
        for made in draw(seed, call):  # noqa: B007  (the last one is complete)
            pass
        needed = _check(made, Random(f"{seed}:{call}:run"), device)
        line |= {"verdict": "set aside"} if "set aside" in needed else {"needed": sorted(needed)} if needed else {}
    except (ValueError, TypeError) as error:
        expected = re.search(r"expected|no mechanism", str(error), re.IGNORECASE)
        line["verdict"] = "refused" if expected else "failed"
        line["why"] = f"{type(error).__name__}: {error}" + ("" if expected else f" {_frame(error)}")
    except AssertionError as error:
        line |= {"verdict": "failed", "why": str(error)}
    except Exception as error:
        line |= {"verdict": "failed", "why": f"{type(error).__name__}: {error} {_frame(error)}"}
    assert made is not None
    line["entry"] = made.entry
    if line["verdict"] == "failed":
        line |= {"reproduce": f"--only {seed}:{call}", "options": str(made.options), "about": made.about}
    return line | {"seconds": round(time.process_time() - start, 4)}


def _frame(error: Exception) -> str:
    inside = [frame for frame in traceback.extract_tb(error.__traceback__) if "heedful" in frame.filename]
    frame = (inside or traceback.extract_tb(error.__traceback__))[-1]
    return f"[{Path(frame.filename).name}:{frame.lineno} {frame.line}]"


def _check(made: Call, random: Random, device: str) -> set[str]:
    """Make all comparisons of this call; return the rules after the first that it needed."""
    if device != "cpu" and _faint(made):
        return {"set aside"}
    exact = copy.deepcopy(made.mechanism).double()
    mechanism = copy.deepcopy(made.mechanism).to(device)  # bounds are derived on the CPU
    inputs = [made.q, made.k, made.v]
    weight = torch.randn(
        *broadcast_shapes(*(x.shape[:-2] for x in inputs)), made.q.shape[-2], made.v.shape[-1],
        generator=torch.Generator().manual_seed(random.getrandbits(40)), dtype=torch.float64,
    ).to(made.q.dtype)  # fmt: skip
    segments = made.segments
    rounding = _rounding(made, made.q, made.k, mechanism.pattern, segments)
    names = ["output", *(f"gradient in {name}" for name in made.wants)]
    if made.learns:
        names += [f"gradient in {name}" for name, _ in mechanism.named_parameters()]

    def results(call: Callable[..., Tensor], attend: Mechanism, weight: Tensor, *given: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(name in made.wants) for name, x in zip("qkv", given, strict=True)]
        with torch.set_grad_enabled(bool(made.wants)):
            out = call(attend, *leaves)
        wanted = [x for x in leaves if x.requires_grad] + (list(attend.parameters()) if made.learns else [])
        if not wanted:
            return [out]
        if not out.requires_grad and call is not fast:  # the definition sees no key, so it returns constant zeros
            return [out, *(torch.zeros_like(x) for x in wanted)]
        grads = torch.autograd.grad(out, wanted, weight.to(out), allow_unused=True, materialize_grads=True)
        return [out.detach(), *grads]

    def fast(attend: Mechanism, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, segments=_to(segments, q.device))

    def slow(attend: Mechanism, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense(attend, q, k, v, _to(segments, q.device)).expand(*weight.shape)

    needed = _compare(
        names,
        lambda *x: results(fast, mechanism, weight, *x),
        lambda *x: results(slow, mechanism, weight, *x),
        lambda *x: results(slow, exact, weight.double(), *x),
        inputs,
        rounding,
        device,
    )
    if random.random() < 0.25:
        needed |= _check_operator(made, mechanism, exact, weight, rounding, device)
    if isinstance(mechanism, RecurrentMechanism) and random.random() < 0.5 and made.q.shape[-2] <= made.k.shape[-2]:
        needed |= _check_steps(made, mechanism, exact, random, device)
    return needed


def _faint(made: Call) -> bool:
    """True if a normaliser of elu + 1 may be below 2^-95, which GPU kernels treat as zero (see `Linear`)."""
    maps = [part.feature_map for part in made.mechanism.modules() if isinstance(part, LinearBase) and part.normalise]
    if not any(each.kernel_name == "elu1" for each in maps) or not made.q.numel() or not made.k.numel():
        return False
    return sum(min(float(x.amin()), 0.0) for x in (made.q, made.k)) < log(LEAST[torch.float32])


def _check_operator(
    made: Call, mechanism: Mechanism, exact: Mechanism, y: Tensor, rounding: Rounding, device: str
) -> set[str]:
    def fast(attend: Mechanism, q: Tensor, k: Tensor, v: Tensor, y: Tensor) -> list[Tensor]:
        A = attend.operator(q, k, segments=_to(made.segments, q.device))
        return [A @ v, A.mT @ y]

    def slow(attend: Mechanism, q: Tensor, k: Tensor, v: Tensor, y: Tensor) -> list[Tensor]:
        A = attend.matrix(q, k, segments=_to(made.segments, q.device))
        return [(A @ v).expand(*y.shape[:-2], -1, -1), (A.mT @ y).expand(*y.shape[:-2], -1, -1)]

    inputs = [made.q, made.k, made.v.expand(*y.shape[:-2], *made.v.shape[-2:]), y]
    names = ["output of A @ x", "output of A.mT @ y"]
    with torch.no_grad():
        return _compare(
            names,
            partial(fast, mechanism),
            partial(slow, mechanism),
            partial(slow, exact),
            inputs,
            rounding,
            device,
        )


def _check_steps(made: Call, mechanism: RecurrentMechanism, exact: Mechanism, random: Random, device: str) -> set[str]:
    """Prefill, with one row of segments or none, then a few steps."""
    n, m = made.q.shape[-2], made.k.shape[-2]
    q = torch.cat([made.q[..., :1, :].expand(*made.q.shape[:-2], m - n, -1), made.q], -2) if n and n < m else made.q
    if q.shape[-2] != m:
        return set()
    after = random.randint(0, min(3, m))
    cut = m - after
    ids = None
    if cut and random.random() < 0.4:
        ids = torch.tensor([random.randint(-1, 1) for _ in range(cut)])
    own = list(range(cut))
    if ids is not None:
        real = [at for at in own if ids[at] >= 0]
        own = [at for at in real if ids[at] == ids[real[-1]]] if real else []

    def fast(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        out, state = mechanism.prefill(*(x[..., :cut, :] for x in (q, k, v)), segments=_to(ids, q.device))
        outs = [out]
        for t in range(cut, m):
            out, state = mechanism.step(state, *(x[..., t : t + 1, :] for x in (q, k, v)))
            outs.append(out)
        return outs

    def slow(attend: Mechanism, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        outs = [dense(attend, *(x[..., :cut, :] for x in (q, k, v)), _to(ids, q.device))]
        for t in range(cut, m):
            index = [*own, *range(cut, t + 1)]
            outs.append(dense(attend, *(x[..., index, :] for x in (q, k, v)))[..., -1:, :])
        batch = broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
        return [out.expand(*batch, -1, -1) for out in outs]

    real = [*own, *range(cut, m)]
    rounding = _rounding(made, q[..., real, :], made.k[..., real, :], h.Causal(), None)
    names = [f"output of prefill of {cut}", *(f"output of step {t}" for t in range(after))]
    with torch.no_grad():
        inputs = [q, made.k, made.v]
        return _compare(names, fast, partial(slow, mechanism), partial(slow, exact), inputs, rounding, device)


def _to(segments: Any, device: torch.device) -> Any:
    if isinstance(segments, tuple):
        return tuple(ids.to(device) for ids in segments)
    return None if segments is None else segments.to(device)


# ---- comparing

Results = Callable[..., list[Tensor]]


def _compare(
    names: list[str],
    fast: Results,
    naive: Results,
    exact: Results,
    inputs: list[Tensor],
    rounding: Rounding,
    device: str,
) -> set[str]:
    """Compare `fast` with `exact` in float64; return the rules after the first that were needed (see the top)."""
    dtype = inputs[0].dtype
    needed = set()
    got = [x.detach().cpu() for x in fast(*(_on(x, device) for x in inputs))]
    if dtype == torch.float64:
        wanted = oracles(exact, *inputs, terms=rounding.terms)
        values = [want.value for want in wanted]
        for name, one, want in zip(names, got, wanted, strict=True):
            try:
                assert_agrees(one, want, name, "unknown")
            except AssertionError:
                floor = 32 * rounding.of_float64() * _size(name, inputs, values, rounding)
                assert_agrees(one, Oracle(want.value, max(want.bound, floor)), name, "unknown")
                needed.add("rounding")
        return needed
    truth = [x.detach() for x in exact(*(x.double() for x in inputs))]
    plain: list[list[Tensor]] = []
    for at, (name, one, want) in enumerate(zip(names, got, truth, strict=True)):
        if one.shape != want.shape or one.dtype != dtype:
            raise Failed(f"{name}: {one.dtype} {tuple(one.shape)}, expected {dtype} {tuple(want.shape)}.")
        if not torch.isfinite(want).all():
            raise Failed(f"{name}: the definition in float64 is not finite.")
        # every gradient has terms with an output as factor: if an output overflows the dtype, they do too
        beyond = any(float(x.abs().max()) > torch.finfo(dtype).max / 4 for x in (want, truth[0]) if x.numel())
        if not want.numel() or beyond:
            continue
        if not plain:
            plain.append([x.detach().cpu() for x in naive(*(_on(x, device) for x in inputs))])
        order = torch.inf if name.startswith("output") else 2
        errs = torch.linalg.vector_norm(plain[0][at].double() - want, order)
        if not torch.isfinite(errs):
            continue  # naive arithmetic overflows in this dtype
        if not torch.isfinite(one).all():
            raise Failed(f"{name}: {int((~torch.isfinite(one)).sum())} of {one.numel()} numbers are not finite.")
        try:
            _assert_precise(name, one, plain[0][at], want, terms=rounding.terms)
        except AssertionError as first:
            off = torch.linalg.vector_norm(one.double() - want, order)
            near = [_neighbour(naive, exact, inputs, at, want, order, device, seed) for seed in range(NEIGHBOURS)]
            errs = max([errs, *near])
            unit = max(
                2 * torch.finfo(dtype).eps * _size(name, inputs, truth, Rounding(1, rounding.rounded)),
                rounding.of_float32() * _size(name, inputs, truth, rounding),
            )
            floor = torch.linalg.vector_norm(torch.full_like(want, unit), order)
            if not off <= max(2 * errs, floor):
                raise Failed(
                    f"{first} At {NEIGHBOURS} inputs a rounding apart it errs up to {errs:.1e}; the rounding of terms "
                    f"that cancel and of exponents explains {floor:.1e}."
                ) from None
            needed.add("neighbours" if off <= 2 * errs else "rounding")
    return needed


@dataclass(frozen=True)
class Rounding:
    """The numbers for the third rule.

    terms      the length of sums
    growth     how much larger the terms of a normalised row are than the row
    exponent   the largest score or logarithm of a feature: e^s has relative error ε·s
    slope      the largest φ(q) or φ(k) over the normaliser, a factor of ∂log w = φ′(q)·φ(k) / w
    rounded    growth if features are rounded to the inputs' dtype, as they are unless a kernel computes them itself
    """

    terms: int
    growth: float = 1.0
    exponent: float = 0.0
    slope: float = 1.0
    rounded: float = 1.0

    def of_float32(self) -> float:
        return torch.finfo(torch.float32).eps * (self.terms**0.5 + self.exponent)

    def of_float64(self) -> float:
        return torch.finfo(torch.float64).eps * (self.terms + self.exponent)


def _rounding(made: Call, q: Tensor, k: Tensor, pattern: h.patterns.Pattern, segments: Segments | None) -> Rounding:
    """Sums over keys, widths, features, latents or landmarks; and Σ |φ(q)|·|φ(k)| / |Σ φ(q)·φ(k)| of normalised rows.

    A product of features and its normaliser have rounding errors relative to the sum of absolute values. For signed
    features (cosines, polynomials, q·k itself) the normaliser may be much smaller than that sum.
    """
    d, widths = q.shape[-1], [made.options.get(name, 0) for name in ("features", "latents", "landmarks", "rank")]
    maps = [part.dim(d) for part in made.mechanism.modules() if isinstance(part, FeatureMap)]
    terms = max(k.shape[-2] + d + sum([*widths, *maps]) * made.options.get("rounds", 1), 1)
    attend = made.mechanism
    if not q.numel() or not k.numel():
        return Rounding(terms)
    q, k = q.double(), k.double()
    exponent = _exponent(made, q, k)
    if isinstance(attend, Nystrom) and segments is None:  # rows of its outer factors sum to 1
        of_queries, of_keys = (landmarks(x, attend.landmarks) for x in (q, k))
        Z = iterated_inverse(attend._between(of_queries, of_keys), attend.iterations)
        return Rounding(terms, max(float(Z.abs().sum(-1).max()), 1.0), exponent)
    if not (isinstance(attend, LinearBase) and attend.normalise) or isinstance(attend.feature_map, LogFeatureMap):
        return Rounding(terms, 1.0, exponent)
    features = copy.deepcopy(attend.feature_map).double()
    layout = resolve(segments, q.shape[-2], k.shape[-2])
    with torch.no_grad():
        x, y = features.query(q, layout.query_positions), features.key(k, layout.key_positions)
    sees = allowed(pattern, layout)
    whole, total = ((a @ b.mT * sees).sum(-1) for a, b in ((x.abs(), y.abs()), (x, y)))
    some = total != 0
    largest = torch.maximum(x.abs().amax(-1), y.abs().amax((-2, -1))[..., None]).expand(total.shape)
    growth, slope = ((part / total.abs())[some] for part in (whole, largest))
    most = [max(float(ratio.max()), 1.0) if ratio.numel() else 1.0 for ratio in (growth, slope)]
    made_inside = features.kernel_name is not None or isinstance(features, RandomFeatures)
    return Rounding(terms, most[0], exponent, most[1], 1.0 if made_inside else most[0])


def _exponent(made: Call, q: Tensor, k: Tensor) -> float:
    """The largest score; for random features it includes ‖x‖²/2 and ωᵀx. An angle has the same error as an exponent."""
    scale = made.options.get("scale") or q.shape[-1] ** -0.5
    longest = float(max(x.square().sum(-1).max() for x in (q, k)))
    if any(isinstance(part, RandomFeatures) for part in made.mechanism.modules()):
        return scale * longest
    if isinstance(made.mechanism, h.Perceiver):  # latents X ← X + M X may double in each round; scores have two of them
        return scale * longest * 4**made.mechanism.rounds
    decay = made.mechanism.log_decay() if isinstance(made.mechanism, LinearBase) else None
    if decay is not None:  # λ^(i − j) = exp(b_i − b_j), b being a sum over at most a chunk
        return min(CHUNK, k.shape[-2]) * float(decay.abs().max())
    if isinstance(made.mechanism, LinearBase) and not isinstance(made.mechanism.feature_map, LogFeatureMap):
        return 0.0
    return scale * float((q @ k.mT).abs().max())


def _size(name: str, inputs: list[Tensor], truth: list[Tensor], rounding: Rounding) -> float:
    """The size of the terms of a result that is a sum; the terms of a gradient may cancel to zero.

    The gradient in q is a sum of (g·v_j − g·o) ∂log w_ij. Here g is the gradient of the output o, with entries of size
    1, and ∂log w_ij = k_j for w = exp(q·k). The gradient in v is a sum of A_ij g_i, also over batch axes that v lacks.
    The gradient in a parameter may have both q and k as factors.
    """
    q, k, v = (float(x.abs().max()) if x.numel() else 0.0 for x in inputs[:3])
    largest = max(float(x.abs().max()) if x.numel() else 0.0 for x in truth)
    if name.startswith("output"):
        return largest * rounding.growth
    if name == "gradient in v":
        return max(largest, 1.0) * rounding.growth
    factor = max(q, k, rounding.slope) ** (1 if name in ("gradient in q", "gradient in k") else 2)
    return max(largest, v * inputs[2].shape[-1] ** 0.5 * factor) * rounding.growth**2


def _neighbour(
    naive: Results, exact: Results, inputs: list[Tensor], at: int, want: Tensor, order: float, device: str, seed: int
):
    """The naive error at inputs that differ by one rounding, or the change when inputs are rounded to float32."""
    generator = torch.Generator().manual_seed(seed)
    eps = torch.finfo(inputs[0].dtype).eps
    moved = [
        (x.double() * (1 + eps * torch.randn(x.shape, generator=generator, dtype=torch.float64))).to(x.dtype)
        for x in inputs
    ]
    near = [x.double() * (1 + 1.2e-7 * torch.randn(x.shape, generator=generator, dtype=torch.float64)) for x in inputs]
    moves = torch.linalg.vector_norm(exact(*near)[at].detach() - want, order)
    one = naive(*(_on(x, device) for x in moved))[at].detach().cpu().double()
    error = torch.linalg.vector_norm(one - exact(*(x.double() for x in moved))[at].detach(), order)
    return max(error, moves) if torch.isfinite(error) else torch.tensor(torch.inf)


def _on(x: Tensor, device: str) -> Tensor:
    return x if device == "cpu" else x.to(device)  # keeps strides


# ---- many calls


def _one_thread() -> None:
    torch.set_num_threads(1)


def _run_many(seed: int, calls: list[int], device: str) -> list[dict[str, Any]]:
    return [run(seed, call, device) for call in calls]


def lines(seed: int, calls: list[int], device: str, workers: int) -> Iterator[dict[str, Any]]:
    """Yield the results of the calls as they come."""
    if workers < 2:
        for call in calls:
            yield run(seed, call, device)
        return
    parts = [calls[at : at + 20] for at in range(0, len(calls), 20)]
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_one_thread) as pool:
        yield from chain.from_iterable(pool.map(partial(_run_many, seed, device=device), parts))


def counts(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The number of calls by verdict and by the rules that they needed, in total and per entry."""

    def of(own: list[dict[str, Any]]) -> dict[str, int]:
        tally = Counter(line["verdict"] for line in own) + Counter(
            rule for line in own for rule in line.get("needed", [])
        )
        return {
            "calls": len(own),
            **{name: tally[name] for name in ("ok", "refused", "failed", "neighbours", "rounding", "set aside")},
        }

    entries = {name: [line for line in found if line["entry"] == name] for name in h.CATALOG}
    return {"all": of(found), "entries": {name: of(own) for name, own in entries.items()}}


def write_summary(path: Path, files: list[Path], device: str, note: str = "") -> int:
    """Write a summary of all results, with code and versions; return how many calls failed."""
    found = {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}
    every = list(chain.from_iterable(found.values()))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    seconds = sum(line["seconds"] for line in every)
    about = {
        **({"note": note} if note else {}),
        "device": torch.cuda.get_device_name(device) if torch.cuda.is_available() and device != "cpu" else device,
        "commit": commit.stdout.strip(),
        "versions": {"heedful": h.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "files": {name: len(own) for name, own in found.items()},
        "cpu_seconds": round(seconds),
        "calls_per_cpu_second": round(len(every) / max(seconds, 1e-9), 1),
    }
    failures = [f"{line['reproduce']} {line['entry']}: {line['why']}" for line in every if line["verdict"] == "failed"]
    path.write_text(json.dumps({**about, **counts(every), "failures": failures}, indent=1, ensure_ascii=False) + "\n")
    return len(failures)


def summary(found: list[dict[str, Any]]) -> str:
    """Print a table by entry, the refusals by message, and the failures."""
    rows = [f"{'entry':<20}{'calls':>7}{'ok':>7}{'refused':>9}{'failed':>8}{'ms':>8}"]
    for name in [*h.CATALOG, "all"]:
        own = [line for line in found if name in (line["entry"], "all")]
        count = Counter(line["verdict"] for line in own)
        mean = 1e3 * sum(line["seconds"] for line in own) / max(len(own), 1)
        row = f"{name:<20}{len(own):>7}{count['ok']:>7}{count['refused']:>9}{count['failed'] or '':>8}{mean:>8.1f}"
        rows += [row] if own else []
    refusals = Counter(re.sub(r"[\d.]+", "#", line["why"])[:110] for line in found if line["verdict"] == "refused")
    rows += ["", "refusals", *(f"{count:>7}  {why}" for why, count in refusals.most_common(40))]
    failures = [line for line in found if line["verdict"] == "failed"]
    whole = counts(found)["all"]
    rows += ["", f"needed the rule of neighbours: {whole['neighbours']}, of rounding: {whole['rounding']}"]
    rows += [
        "",
        f"{len(failures)} failures",
        *(f"{x['reproduce']}  {x['entry']}: {x['why'][:200]}" for x in failures[:50]),
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000, help="calls 0 … CALLS − 1 of the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no call after so many seconds")
    parser.add_argument("--workers", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--out", type=Path, help="JSON lines, appended to; fuzz-SEED-DEVICE.jsonl by default")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="write counts by entry to FILE, as JSON")
    parser.add_argument("--of", type=Path, nargs="+", help="run nothing: the summary is of these results")
    parser.add_argument("--note", default="", help="a sentence for the summary")
    parser.add_argument("--only", metavar="SEED:CALL", help="run one call and print everything about it")
    given = parser.parse_args()
    _one_thread()
    if given.of and given.summary:
        return int(write_summary(given.summary, given.of, given.device, given.note) > 0)
    if given.only:
        seed, call = map(int, given.only.split(":"))
        line = run(seed, call, given.device)
        print(*(f"{name}: {value}" for name, value in line.items()), sep="\n")
        return int(line["verdict"] == "failed")
    out = given.out or Path(f"fuzz-{given.seed}-{given.device}.jsonl")
    found = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {line["call"] for line in found}
    todo = [call for call in range(given.calls) if call not in done]
    start = told = time.monotonic()
    with out.open("a") as file:
        for line in lines(given.seed, todo, given.device, given.workers):
            found.append(line)
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            now = time.monotonic()
            if now - told > 10:
                told = now
                file.flush()
                rate = (len(found) - len(done)) / (now - start)
                bad = sum(line["verdict"] == "failed" for line in found)
                print(f"{len(found)} of {given.calls} calls, {rate:.0f} a second, {bad} failed", file=sys.stderr)
            if now - start > given.seconds:
                break
    print(summary(found))
    if given.summary:
        write_summary(given.summary, [out], given.device, given.note)
    return int(any(line["verdict"] == "failed" for line in found))


if __name__ == "__main__":
    sys.exit(main())
