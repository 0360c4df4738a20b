"""Softmax over patterns on a GPU: errors, times, and the best tiles.

    python benchmarks/gpu_softmax.py                            all of it, in three minutes
    python benchmarks/gpu_softmax.py --check                    errors against float64, beside the naive errors
    python benchmarks/gpu_softmax.py --tune                     the best tiles of every kernel
    python benchmarks/gpu_softmax.py --bench                    the README's table
    python benchmarks/gpu_softmax.py --products                 float32 columns times 16-bit q and k: all three of these
    … --only bigbird                                            checks and workloads with one of these words in the name
    … --out results.json  --workers 14                          compile programs in parallel beforehand

Peers are timed in the same run: compiled FlexAttention, and torch's fused kernel if the pattern is dense.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import subprocess
import sys
import time
import types
from pathlib import Path

import torch
import triton
from triton.testing import do_bench

ROOT = Path(__file__).resolve().parents[1]


def _load(*names):
    """The kernel's modules; loaded without their packages if those do not import."""
    sys.path.insert(0, str(ROOT / "src"))
    base = "heedful.kernels.softmax"
    try:
        return tuple(importlib.import_module(f"{base}.{name}") for name in names)
    except ImportError:
        for package in ("heedful", "heedful.kernels", "heedful.kernels.blocked", base):
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [str(ROOT / "src" / package.replace(".", "/"))]
        return tuple(importlib.import_module(f"{base}.{name}") for name in names)


fused, launches, lists, rows, products = _load("fused", "launches", "lists", "rows", "products")
torch._dynamo.config.recompile_limit = 64  # the peer is compiled for each mask and length
from heedful.patterns import Blocks, Causal, Full, Global, RandomBlocks, SparseFixed, Window  # noqa: E402
from heedful.segments import visible  # noqa: E402

PLAIN = rows.SoftmaxRows()
sdpa = torch.nn.functional.scaled_dot_product_attention
BEGAN = time.monotonic()


def attend(q, k, v, pattern, segments=None, **more):
    inputs = q, k, v, rows.SoftmaxRows(**more), pattern, segments, q.shape[-1] ** -0.5
    why = fused.objections(*inputs)
    assert not why, why
    return fused.attend(*inputs)


def naive(q, k, v, pattern, segments=None, softcap=None, sink=None):
    """The dense computation, every step in the dtype of its inputs."""
    seen = visible(pattern, q.shape[-2], k.shape[-2], segments, q.device)
    x = q @ k.mT * q.shape[-1] ** -0.5
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    x = x.masked_fill(~seen, -torch.inf)
    if sink is not None:
        x = torch.cat([x, sink.to(x)[:, None, None].expand(*x.shape[:-1], 1)], -1)
        return x.softmax(-1)[..., :-1] @ v
    blind = ~seen.any(-1, keepdim=True)
    return x.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0) @ v


def draw(B, H, n, d, *, m=None, Hkv=None, e=None, dtype=torch.bfloat16, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    m, Hkv, e = m or n, Hkv or H, e or d
    shapes = (B, Hkv, H // Hkv, n, d), (B, Hkv, 1, m, d), (B, Hkv, 1, m, e)
    if Hkv == H:
        shapes = (B, H, n, d), (B, H, m, d), (B, H, m, e)
    return [torch.randn(s, generator=g, device="cuda").to(dtype).requires_grad_() for s in shapes]


def packed(B, n, length, axes):
    ids = (torch.arange(n, device="cuda") // length).expand(B, n).clone()
    ids[0, -n // 20 :] = -1
    return ids.view(B, *(1,) * axes, n)


LONGFORMER = Global((0, 1, 2, 3)) | Window(128, 128)
RANDOM = RandomBlocks(64, 3)
BIGBIRD = Window(96, 96) | Global((0,)) | RANDOM
SPARSE_FIXED = SparseFixed(128, 8) & Causal()
half, single = torch.float16, torch.float32
CHECKS = {
    "window": dict(pattern=Window(200)),
    "window both ways": dict(pattern=Window(70, 30)),
    "window sinks": dict(pattern=Window(200, sinks=4)),
    "window 5, 100 sinks": dict(pattern=Window(5, sinks=100)),
    "blocks": dict(pattern=Blocks(100)),
    "causal blocks": dict(pattern=Blocks(256) & Causal()),
    "longformer": dict(pattern=LONGFORMER),
    "causal": dict(pattern=Causal()),
    "full": dict(pattern=Full()),
    "after a cache": dict(pattern=Window(200, sinks=4), n=300, m=1000),
    "longformer cache": dict(pattern=LONGFORMER, n=998, m=1000),
    "n 63": dict(pattern=Window(20), n=63),
    "n 1": dict(pattern=Window(20), n=1, m=100),
    "shared heads": dict(pattern=Window(200, sinks=4), H=4, Hkv=2),
    "packed window": dict(pattern=Window(200), packed=300),
    "packed sinks": dict(pattern=Window(200, sinks=4), packed=300),
    "packed longformer": dict(pattern=LONGFORMER, packed=170),
    "packed causal": dict(pattern=Causal(), packed=300, H=4, Hkv=2),
    "d128": dict(pattern=Window(200, sinks=4), d=128),
    "d96": dict(pattern=Window(200), d=96),
    "d256": dict(pattern=Window(200), d=256),
    "d40 e24": dict(pattern=Window(200), d=40, e=24),
    "d32": dict(pattern=Window(200), d=32),
    "d48 e80": dict(pattern=Window(200, sinks=4), d=48, e=80),
    "d128 e32": dict(pattern=Window(200), d=128, e=32),
    "fp32 d40 e24": dict(pattern=Window(200), d=40, e=24, dtype=single),
    "odd strides": dict(pattern=Window(200), odd=True),
    "softcap": dict(pattern=Window(200, sinks=4), softcap=2.0),
    "fp32 softcap": dict(pattern=Causal(), softcap=2.0, dtype=single),
    "sink logit": dict(pattern=Window(200), sink=(1.0, 4.0)),
    "fp32 sink longformer": dict(pattern=LONGFORMER, sink=(1.0, 4.0), dtype=single),
    "d64 e128": dict(pattern=Window(200), e=128),
    "fp16": dict(pattern=Window(200, sinks=4), dtype=half),
    "fp32": dict(pattern=Window(200, sinks=4), dtype=single),
    "fp32 longformer": dict(pattern=LONGFORMER, dtype=single),
    "fp32 packed": dict(pattern=Window(200, sinks=4), dtype=single, packed=300),
    "fp32 d128": dict(pattern=Window(200), dtype=single, d=128),
    "fp32 d256": dict(pattern=Window(200), dtype=single, d=256),
    "bigbird": dict(pattern=BIGBIRD),
    "bigbird, n 1003 d44": dict(pattern=BIGBIRD, n=1003, d=44),
    "sparse-fixed": dict(pattern=SPARSE_FIXED, H=4, Hkv=2),
    "sparse-fixed d128": dict(pattern=SPARSE_FIXED, d=128),
    "sparse-fixed packed": dict(pattern=SPARSE_FIXED, packed=300),
    "blind rows": dict(pattern=RandomBlocks(64, 2) & Causal()),
    "fp32 bigbird": dict(pattern=BIGBIRD, dtype=single),
    "fp32 sparse-fixed": dict(pattern=SPARSE_FIXED, dtype=single),
    "fp32 sparse-fixed d128": dict(pattern=SPARSE_FIXED, dtype=single, d=128),
}


def errors(got, want):
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(got, want, strict=True)]


def outcome(function, inputs, do, pattern, segments, **more):
    o = function(*inputs, pattern, segments, **more)
    return o.detach(), *torch.autograd.grad(o, inputs, do.to(o))


def case(pattern, n=1000, d=64, H=2, Hkv=None, packed_by=0, odd=False, **rest):
    inputs = draw(2, H, n, d, Hkv=Hkv, **rest)
    if odd:  # rows with odd strides
        inputs = [torch.cat([x, x[..., :3]], -1)[..., :d].detach().requires_grad_() for x in inputs]
    segments = packed(2, n, packed_by, inputs[0].ndim - 3) if packed_by else None
    o = torch.broadcast_shapes(inputs[0].shape[:-2], inputs[2].shape[:-2])
    do = torch.randn(*o, n, inputs[2].shape[-1], device="cuda")
    return inputs, do, pattern, segments


def one_check(name):
    options = dict(CHECKS[name])
    options["packed_by"] = options.pop("packed", 0)
    more = dict(softcap=options.pop("softcap", None), sink=options.pop("sink", None))
    more["sink"] = None if more["sink"] is None else torch.tensor(more["sink"], device="cuda")
    inputs, do, pattern, segments = case(**options)
    honest = launches.launching.empty
    launches.launching.empty = lambda shape, like, dtype=torch.float32: torch.full(
        shape, torch.nan if dtype.is_floating_point else -9, dtype=dtype, device=like.device
    )
    try:
        got = outcome(attend, inputs, do, pattern, segments, **more)
        again = outcome(attend, inputs, do, pattern, segments, **more)
        args = rows.SoftmaxRows(**more), pattern, segments, inputs[0].shape[-1] ** -0.5
        adjoint = fused.adjoint(*(x.detach() for x in inputs[:2]), do.to(inputs[0].dtype), *args)
        stats = None
        if not fused.about_intervals(*inputs, pattern, segments):
            stats = fused.row_statistics(*(x.detach() for x in inputs[:2]), *args)
    finally:
        launches.launching.empty = honest
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = list(outcome(naive, exact, do, pattern, segments, **more))
    theirs = list(outcome(naive, inputs, do, pattern, segments, **more))
    eye = torch.eye(inputs[1].shape[-2], device="cuda")
    for results, x in ((want, exact), (theirs, inputs)):
        with torch.no_grad():
            weights = naive(x[0], x[1], eye.to(x[0].dtype), pattern, segments, **more)
            results.append(weights.mT @ do.to(inputs[0].dtype).to(x[0].dtype))
    mine, base = errors([*got, adjoint], want), errors(theirs, want)
    found = dict(
        error=mine,
        naive=base,
        worst_ratio=max(x / max(y, 1e-12) for x, y in zip(mine, base, strict=True)),
        bit_equal=all(torch.equal(x, y) for x, y in zip(got, again, strict=True)),
        statistics=0.0,
        place=True,
    )
    if stats is None:
        return found
    with torch.no_grad():
        a = naive(*exact[:2], eye.double(), pattern, segments, more["softcap"]).flatten(0, -3)
    _, square, entropy, largest, place = (x.flatten(0, -2) for x in stats)
    close = [square - a.square().sum(-1), entropy + torch.special.xlogy(a, a).sum(-1), largest - a.amax(-1)]
    sure = a.topk(min(2, a.shape[-1]), -1).values
    sure = sure[..., 0] > 1.001 * sure[..., -1] if sure.shape[-1] > 1 else sure[..., 0] > 2
    right = ((place == a.argmax(-1)) | ~sure).all().item()
    return {**found, "statistics": max(x.abs().max().item() for x in close), "place": right}


def check() -> dict:
    torch.backends.cuda.matmul.allow_tf32 = False
    table = {}
    print("check: error / naive error of o dq dk dv Aᵀy; worst absolute error of Σa², entropy, max a", flush=True)
    for name in CHECKS:
        try:
            found = one_check(name)
        except Exception as error:
            table[name] = dict(failed=str(error)[:300])
            print(f"{name:20s} FAILED {type(error).__name__} {str(error)[-250:]}", flush=True)
            continue
        table[name] = found
        good = found["worst_ratio"] <= 2 and found["bit_equal"] and found["place"]
        pairs = zip(found["error"], found["naive"], strict=True)
        text = " ".join(f"{x:.1e}/{y:.1e}" for x, y in pairs)
        verdict = "ok " if good else f"BAD equal={found['bit_equal']} place={found['place']}"
        print(f"{name:20s} {verdict} x{found['worst_ratio']:.2f} {text} | {found['statistics']:.0e}", flush=True)
    return table


TUNED = {
    64: dict(
        attend=[
            *itertools.product((128,), (64,), (4, 8), (2, 3, 4)),
            *itertools.product((64,), (64,), (4,), (2, 3, 4)),
            *itertools.product((128,), (128,), (4, 8), (2, 3)),
            *itertools.product((128, 64), (32,), (4,), (3, 4)),
        ],
        queries=[
            *itertools.product((128,), (64,), (4, 8), (2, 3)),
            *itertools.product((64,), (64,), (4,), (2, 3)),
            *itertools.product((128,), (128,), (8,), (2,)),
            *itertools.product((128, 64), (32,), (4,), (2, 3, 4)),
            (64, 128, 4, 2),
        ],
        keys=[
            *itertools.product((128,), (64,), (8,), (2, 3)),
            *itertools.product((64,), (64,), (4, 8), (2, 3)),
            *itertools.product((128, 64), (32,), (4, 8), (2, 3)),
            (128, 128, 8, 2),
            (64, 128, 8, 2),
        ],
        adjoint=[
            *itertools.product((128,), (64,), (4, 8), (2, 3)),
            *itertools.product((64,), (64,), (4,), (2, 3)),
            *itertools.product((128,), (128,), (8,), (2, 3)),
        ],
        statistics=[*itertools.product((128,), (64, 128), (4, 8), (2, 3)), (64, 64, 4, 3)],
    ),
    128: dict(
        attend=[(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3)],
        queries=[(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 4, 3)],
        keys=[(64, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 8, 3)],
    ),
}
WINDOW = Window(511)


def launching(name, job, lse, do, o, delta):
    """A closure that makes one launch of one kernel."""
    setup = job.setup
    dq, dk, dv = (torch.empty_like(x) for x in (job.q, job.k, job.v))
    dq = dq.unsqueeze(2)  # no shared keys here
    return {
        "attend": lambda: launches.attend_rows(job, o, lse, 0, setup.n, 1, 0),
        "queries": lambda: launches.query_rows(job, o, lse, do, delta, dq, 0, setup.n, 1, 0),
        "keys": lambda: launches.key_rows(job, lse, do, delta, dk, dv, 0, setup.m, 1, 0),
        "adjoint": lambda: launches.key_rows(job, lse, do, None, None, dv, 0, setup.m, 1, 0),
        "statistics": lambda: launches.statistics(job),
    }[name]


def tuning(n, only=None):
    """Yield every kernel in every configuration, as (width, name, config, launch)."""
    for width, kernels in TUNED.items():
        for name, configs in kernels.items():
            dense = name in ("adjoint", "statistics")
            inputs = [x.detach() for x in draw(1, 1 if dense else 16 * 64 // width, n, width)]
            job = fused._job(*inputs, PLAIN, Full() if dense else WINDOW, None, width**-0.5)
            o, lse = launches.attend(job)
            do, delta = torch.randn_like(o), torch.randn_like(lse)
            run = launching(name, job, lse, do, o, delta)
            for number, config in enumerate(configs):
                if only is None or number % only[1] == only[0]:
                    job.setup.configs = {**job.setup.configs, name: launches.Config(*config)}
                    job.setup.ready.clear()
                    yield width, name, config, run
            launches.SETUPS.clear()


def tune(n=65536, until=120.0) -> list:
    found, shown = [], None
    for width, name, config, run in tuning(n):
        if shown not in (None, (width, name)):
            show(found, shown)
        shown = width, name
        if time.monotonic() - BEGAN > until:
            print("tune: out of time at", width, name, config, flush=True)
            break
        try:
            found.append((width, name, config, median(run, 15)))
        except Exception as error:
            found.append((width, name, config, float("inf")))
            print(f"  {width} {name} {config} {type(error).__name__} {str(error)[:90]!r}", flush=True)
    show(found, shown)
    return found


def show(found, which):
    best = sorted((ms, config) for width, name, config, ms in found if (width, name) == which)
    text = "  ".join(f"{','.join(map(str, config))}: {ms:.3f}" for ms, config in best[:6])
    print(f"tune d{which[0]} {which[1]:10s} {text}", flush=True)


TUNED_PRODUCTS = {
    (64, 64): [
        *itertools.product((128,), (64,), (4, 8), (2, 3)),
        *itertools.product((64,), (64,), (4,), (2, 3)),
        *itertools.product((128,), (128,), (8,), (2, 3)),
        (64, 128, 4, 2),
        (128, 32, 8, 3),
        (256, 64, 8, 2),
    ],
    (64, 128): [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 8, 2), (128, 32, 8, 3), (128, 128, 8, 2)],
    (128, 64): [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3)],
}


def both_products(n, d, pattern=WINDOW, dtype=torch.bfloat16):
    """A Y and Aᵀ Y of one head by these kernels; and with inputs cast to float32, by three tf32 products each."""
    q, k = (x.detach() for x in draw(1, 1, n, d, dtype=dtype)[:2])
    given = PLAIN, pattern, None, d**-0.5
    here, memory, wide = products.Products(q, k, *given), {}, (q.float(), k.float())
    raised = (
        lambda y: fused.attend(*wide, y, *given),
        lambda y: fused.adjoint(*wide, y, *given, memory=memory),
    )
    return q, k, (here.apply, here.adjoint), raised


def check_products() -> dict:
    table = {}
    print("check: error of A Y and Aᵀ Y against float64 / with q and k raised", flush=True)
    names = ("window", "window sinks", "longformer", "causal", "full", "blocks")
    for name, d, dtype in itertools.product(names, (64, 40, 128), (torch.bfloat16, half)):
        q, k, here, raised = both_products(4096, d, CHECKS[name]["pattern"], dtype)
        y = torch.randn(1, 1, 4096, 100, device="cuda")
        weights = naive(q.double(), k.double(), torch.eye(4096, device="cuda").double(), CHECKS[name]["pattern"])
        want = weights @ y.double(), weights.mT @ y.double()
        mine, base = (errors([f(y) for f in forms], want) for forms in (here, raised))
        equal = all(torch.equal(f(y), f(y)) for f in here)
        table[f"{name} d{d} {dtype}"] = dict(error=mine, raised=base, bit_equal=equal)
        text = " ".join(f"{x:.1e}/{z:.1e}" for x, z in zip(mine, base, strict=True))
        print(f"{name:14s} d{d} {dtype} {'ok ' if equal and max(mine) < 1e-6 else 'BAD'} {text}", flush=True)
    return table


def tune_products(n=65536) -> list:
    """Find the best tiles for products with one causal head."""
    found = []
    for (d, E), configs in TUNED_PRODUCTS.items():
        products.columns_of = lambda e, E=E: E
        for side, name in enumerate(("forward", "adjoint")):
            times = []
            for config in configs:
                products.CONFIGS[d, E] = dict.fromkeys(("forward", "adjoint"), launches.Config(*config))
                products.READY.clear()
                y = torch.randn(1, 1, n, E, device="cuda")
                run = both_products(n, d, Causal())[2][side]
                try:
                    times.append((median(lambda run=run, y=y: run(y), 30), config))
                except Exception as error:
                    print(f"  {d} {E} {name} {config} {type(error).__name__} {str(error)[:90]!r}", flush=True)
            text = "  ".join(f"{','.join(map(str, config))}: {ms:.3f}" for ms, config in sorted(times)[:6])
            print(f"tune d{d} {E} columns {name:8s} {text}", flush=True)
            found.append((d, E, name, times))
    return found


def bench_products() -> list:
    results = []
    for n, pattern, e in itertools.product((8192, 65536), (Causal(), Full()), (64, 128)):
        *_, here, raised = both_products(n, 64, pattern)
        y = torch.randn(1, 1, n, e, device="cuda")
        times = [median(lambda f=f, y=y: f(y), 30) for f in (*here, *raised)]
        print(
            f"N{n} {pattern} {e} columns:", " ".join(f"{ms:.3f}" for ms in times), "(raised: the last two)", flush=True
        )
        results.append(dict(n=n, pattern=str(pattern), columns=e, ms=times))
    return results


def all_products() -> dict:
    timed_first = bench_products()  # before the table is overwritten
    return dict(check=check_products(), bench=timed_first, tune=tune_products())


WORK = {
    "window 512, B1 N65536": dict(B=1, n=65536, pattern=WINDOW, flex="window"),
    "window 512, B4 N8192": dict(B=4, n=8192, pattern=WINDOW, flex="window"),
    "window 512 + 4 sinks, B1 N65536": dict(B=1, n=65536, pattern=Window(511, sinks=4), flex="sinks"),
    "window 512 + 4 sinks, B4 N8192": dict(B=4, n=8192, pattern=Window(511, sinks=4), flex="sinks"),
    "window 512, softcap 50, B1 N65536": dict(B=1, n=65536, pattern=WINDOW, softcap=50.0),
    "blocks 256, B1 N65536": dict(B=1, n=65536, pattern=Blocks(256), flex="blocks"),
    "longformer 256 + 4, B1 N65536": dict(B=1, n=65536, pattern=LONGFORMER, flex="longformer"),
    "longformer 256 + 4, B4 N8192": dict(B=4, n=8192, pattern=LONGFORMER),
    "window 512, packed in 1000, B1 N65536": dict(B=1, n=65536, pattern=WINDOW, packed=1000),
    "causal, packed in 1000, B1 N65536": dict(B=1, n=65536, pattern=Causal(), packed=1000),
    "window 512, N65500": dict(B=1, n=65500, pattern=WINDOW),
    "window 512, 4 key heads": dict(B=1, n=65536, pattern=WINDOW, Hkv=4),
    "window 512, H8 d128": dict(B=1, n=65536, pattern=WINDOW, d=128, H=8, flex="window"),
    "window 512, d96": dict(B=1, n=65536, pattern=WINDOW, d=96),
    "window 512, fp16": dict(B=1, n=65536, pattern=WINDOW, dtype=half),
    "window 512, fp32": dict(B=1, n=16384, pattern=WINDOW, dtype=single),
    "causal, B4 N8192": dict(B=4, n=8192, pattern=Causal(), sdpa=True),
    "bigbird, B1 N8192": dict(B=1, n=8192, pattern=BIGBIRD, flex="bigbird", mask=True),
    "sparse-fixed, B1 N8192": dict(B=1, n=8192, pattern=SPARSE_FIXED, flex="sparse-fixed", mask=True),
    "bigbird, B1 N32768": dict(B=1, n=32768, pattern=BIGBIRD),
    "sparse-fixed, B1 N32768": dict(B=1, n=32768, pattern=SPARSE_FIXED),
    "bigbird, fp32, B1 N8192": dict(B=1, n=8192, pattern=BIGBIRD, dtype=single, mask=True),
    "sparse-fixed, fp32, B1 N8192": dict(B=1, n=8192, pattern=SPARSE_FIXED, dtype=single, mask=True),
}
MODS = {
    "window": lambda b, h, i, j: (j <= i) & (i - j <= 511),
    "sinks": lambda b, h, i, j: (j <= i) & ((i - j <= 511) | (j < 4)),
    "blocks": lambda b, h, i, j: i // 256 == j // 256,
    "longformer": lambda b, h, i, j: ((i - j <= 128) & (j - i <= 128)) | (i < 4) | (j < 4),
    "sparse-fixed": lambda b, h, i, j: ((i // 128 == j // 128) | (j % 128 >= 120)) & (j <= i),
}


def bigbird_mod(n):
    """BigBird's mask for FlexAttention; a table says which blocks are connected."""
    at = torch.arange(0, n, 64, device="cuda")
    joined = RANDOM.allows(at[:, None], at)

    def sees(b, h, i, j):
        return ((i - j <= 96) & (j - i <= 96)) | (i == 0) | (j == 0) | joined[i // 64, j // 64]

    return sees


def median(function, milliseconds=60):
    return do_bench(function, warmup=10, rep=milliseconds, return_mode="median")


def timed(function, inputs):
    """ms forward, ms forward + backward, and peak GiB of the latter beyond its inputs."""

    def forward():
        with torch.no_grad():
            return function(*inputs)

    do = torch.randn_like(forward())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(function(*inputs), inputs, do)
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return median(forward), median(lambda: torch.autograd.grad(function(*inputs), inputs, do)), peak


def prepare(work, n=None):
    work = dict(work)
    B, n, pattern = work.pop("B"), n or work["n"], work.pop("pattern")
    kind = dict(Hkv=work.get("Hkv"), dtype=work.get("dtype", torch.bfloat16))
    inputs = draw(B, work.get("H", 16), n, work.get("d", 64), **kind)
    segments = None
    if "packed" in work:
        segments = packed(B, n, work["packed"], inputs[0].ndim - 3)
    return inputs, pattern, segments


def flex(name, n):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    run = flex.__dict__.setdefault("compiled", torch.compile(flex_attention))
    make = flex.__dict__.setdefault("make", torch.compile(create_block_mask))
    mask = make(bigbird_mod(n) if name == "bigbird" else MODS[name], None, None, n, n, device="cuda")
    return lambda q, k, v: run(q, k, v, block_mask=mask)


def with_mask(pattern, q):
    """Torch's kernel with a dense mask, shared by all heads."""
    n = q.shape[-2]
    hidden = ~visible(pattern, n, n, None, q.device)
    mask = torch.zeros(n, n, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf).expand(*q.shape[:2], n, n)
    return lambda q, k, v: sdpa(q, k, v, mask)


def making(pattern, n) -> float:
    """ms to build the block lists of a pattern a second time, with an empty cache."""
    for _ in range(2):
        lists._unsegmented.cache_clear()
        torch.cuda.synchronize()
        start = time.perf_counter()
        lists.lists(pattern, n, n, None, torch.device("cuda", torch.cuda.current_device()), 64, 64)
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def bench(until=185.0) -> list:
    results = []
    for name, work in WORK.items():
        inputs, pattern, segments = prepare(work)
        row = dict(work=name)
        line = f"{name:40s}"
        forms = {"here": lambda q, k, v, p=pattern, s=segments, w=work: attend(q, k, v, p, s, softcap=w.get("softcap"))}
        if not fused._are_intervals(pattern, segments):
            row["lists_ms"] = making(pattern, work["n"])
            line += f" lists in {row['lists_ms']:.0f} ms "
        if "mask" in work:
            forms["mask"] = with_mask(pattern, inputs[0])
        if "sdpa" in work:
            forms["sdpa"] = lambda q, k, v: sdpa(q, k, v, is_causal=True)
        if "flex" in work and time.monotonic() - BEGAN < until - 15:
            forms["flex"] = None
        for form, function in forms.items():
            if time.monotonic() - BEGAN > until:
                break
            try:
                function = flex(work["flex"], work["n"]) if form == "flex" else function
                forward, both, gib = timed(function, inputs)
                row[form] = dict(forward_ms=forward, both_ms=both, peak_GiB=gib)
                line += f" {form} {forward:.3f} / {both:.3f} ms {gib:.2f} GiB  "
            except Exception as error:
                row[form] = dict(failed=str(error)[:300])
                line += f" {form} FAILED {type(error).__name__} {str(error)[:160]}"
        print(line, flush=True)
        results.append(row)
        del inputs
    return results


def measuring() -> list:
    """Time for one head: row statistics, adjoint, log-sum-exp, beside torch's forward product."""
    results = []
    for n, pattern in ((8192, Full()), (65536, Full()), (65536, Causal())):
        q, k, v = (x.detach() for x in draw(1, 1, n, 64))
        args = PLAIN, pattern, None, 0.125
        memory = dict(lse=fused.log_sum_exp(q, k, *args))
        row = dict(work=f"one head, N{n}, {pattern}")
        work = {
            "sdpa A x": lambda q=q, k=k, v=v, p=pattern: sdpa(q, k, v, is_causal=isinstance(p, Causal)),
            "A x": lambda q=q, k=k, v=v, p=pattern: attend(q, k, v, p),
            "Aᵀ y": lambda q=q, k=k, v=v, args=args, memory=memory: fused.adjoint(q, k, v, *args, memory=memory),
            "lse": lambda q=q, k=k, args=args: fused.log_sum_exp(q, k, *args),
            "statistics": lambda q=q, k=k, args=args: fused.row_statistics(q, k, *args),
        }
        for name, function in work.items():
            try:
                row[name] = median(function)
            except Exception as error:
                row[name] = str(error)[:200]
        print(" ".join(f"{x} {y:.3f}" if isinstance(y, float) else f"{x} {y}" for x, y in row.items()), flush=True)
        results.append(row)
    return results


def host(repeats=200) -> dict:
    """µs of CPU time for a call, forward and both passes."""
    inputs = draw(1, 16, 512, 64)
    do = torch.randn_like(inputs[0])

    def forward():
        with torch.no_grad():
            attend(*inputs, WINDOW)

    def both():
        torch.autograd.grad(attend(*inputs, WINDOW), inputs, do)

    found = {}
    for function in (forward, both):
        function()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        found[function.__name__] = (time.perf_counter() - start) / repeats * 1e6
        torch.cuda.synchronize()
    print("host µs a call:", {name: round(x) for name, x in found.items()}, flush=True)
    return found


PEERS = 2  # workers that compile FlexAttention


def narrow(words: list[str]) -> None:
    """Keep only the checks and workloads with one of the words in their name."""
    for table in (CHECKS, WORK):
        for name in [name for name in table if not any(word in name for word in words)]:
            del table[name]


def warm(share: int, of: int, all_tiles: bool) -> None:
    """Compile a share of all programs, at small sizes; the results stay in Triton's cache."""
    jobs = [lambda name=name: one_check(name) for name in CHECKS]
    jobs += [lambda work=work: small(work) for work in WORK.values()]
    others = of - PEERS
    if share >= others:  # at the timed sizes: FlexAttention compiles each length separately
        for work in [work for work in WORK.values() if "flex" in work][share - others :: PEERS]:
            attempt(lambda work=work: timed_once(flex(work["flex"], work["n"]), prepare(work)[0]))
        return
    for job in jobs[share::others]:
        attempt(job)
    for *_, run in tuning(2048, (share, others)) if all_tiles else ():
        attempt(run)


def small(work):
    inputs, pattern, segments = prepare(dict(work, B=work["B"]), n=2048)
    timed_once(lambda q, k, v: attend(q, k, v, pattern, segments, softcap=work.get("softcap")), inputs)


def timed_once(function, inputs):
    o = function(*inputs)
    torch.autograd.grad(o, inputs, torch.randn_like(o))


def attempt(job):
    try:
        job()
        torch.cuda.synchronize()
    except Exception:
        pass  # it fails again when it is measured, and is reported there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("check", "tune", "bench", "products"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--out")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        narrow(args.only)
    if args.share is not None:
        return warm(args.share, args.workers, not args.only)
    everything = not (args.check or args.tune or args.bench or args.products)
    if args.workers > 1 and not args.products:
        only = ["--only", *args.only] if args.only else []
        flags = [sys.executable, __file__, *only, "--workers", str(args.workers), "--share"]
        children = [
            subprocess.Popen([*flags, str(i)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for i in range(args.workers)
        ]
        for child in children:
            try:
                child.wait(max(1.0, 80 - (time.monotonic() - BEGAN)))
            except subprocess.TimeoutExpired:
                child.kill()
        print(f"compiled after {time.monotonic() - BEGAN:.0f} s", flush=True)
    result = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
    sections = {"check": check, "tune": tune, "bench": bench}
    if not args.only:
        sections |= {"measuring": measuring, "host": host}
    if args.products:
        sections = {"products": all_products}
    for name, section in sections.items():
        wanted = everything or (args.bench if name in ("bench", "measuring", "host") else getattr(args, name))
        if wanted:
            result[name] = section()
            print(f"-- {name} done after {time.monotonic() - BEGAN:.0f} s", flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
