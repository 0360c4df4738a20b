"""Chunked linear attention on a GPU: errors, times, and the best configurations.

    python benchmarks/gpu_chunked_linear.py --check             errors against float64, beside the naive errors
    python benchmarks/gpu_chunked_linear.py --long              does the error grow with n
    python benchmarks/gpu_chunked_linear.py --tune d64          the best configurations, beside the table's
    python benchmarks/gpu_chunked_linear.py --profile           where the CPU time goes
    python benchmarks/gpu_chunked_linear.py --bench out.json    the README's table; --peer adds the peer's

Lower bounds count each input read once and each output written once at the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import torch
import triton
from triton.testing import do_bench

ROOT = Path(__file__).resolve().parents[1]


def _load():
    """The kernel's two modules; loaded without their packages if those do not import."""
    name = "heedful.kernels.chunked_linear"
    try:
        return tuple(importlib.import_module(f"{name}.{x}") for x in ("reference", "triton"))
    except ImportError:
        for package in ("heedful", "heedful.kernels", name):
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [str(ROOT / "src" / package.replace(".", "/"))]
        return tuple(importlib.import_module(f"{name}.{x}") for x in ("reference", "triton"))


reference, fused = _load()
launches = fused.launches


def naive(q, k, v, *, feature="identity", normalise=True, causal=True, log_decay=None, angles=None, segments=None):
    """The dense computation, every step in the dtype of its inputs."""
    (_, H, n, _), (_, Hkv, m, _) = q.shape, v.shape
    x, y = (torch.where(a > 0, a + 1, a.clamp(max=0).exp()) if feature == "elu1" else a for a in (q, k))
    x, y = (a.exp() if feature == "exp" else a.relu() if feature == "relu" else a for a in (x, y))
    if angles is not None:
        cos, sin = (turn[:, None, :, None].to(q.dtype) for turn in (angles.cos(), angles.sin()))
        x, y = (torch.cat([a * cos, a * sin], -1) for a in (x, y))
    y, v = (a.repeat_interleave(H // Hkv, 1) for a in (y, v))
    allowed = torch.ones(n, m, dtype=torch.bool, device=q.device)
    allowed = allowed.tril() if causal else allowed
    if segments is not None:
        allowed = allowed & ((segments[:, :, None] == segments[:, None]) & (segments >= 0)[:, None])[:, None]
    a = (x @ y.mT).masked_fill(~allowed, 0)
    if log_decay is not None:
        at = torch.arange(n, device=q.device)
        b = log_decay.double()[None, :, None] * at if log_decay.ndim == 1 else log_decay.double().cumsum(-1)
        a = a * torch.where(allowed, b[..., :, None] - b[..., None, :], -torch.inf).exp().to(a.dtype)
    below = a.sum(-1, keepdim=True)
    return torch.where(below != 0, a @ v / torch.where(below != 0, below, 1), 0) if normalise else a @ v


def draw(B, H, n, d, *, Hkv=None, e=None, dtype=torch.bfloat16, seed=0, positive=False):
    g = torch.Generator("cuda").manual_seed(seed)
    Hkv, e = Hkv or H, e or d
    shapes = (B, H, n, d), (B, Hkv, n, d), (B, Hkv, n, e)
    q, k, v = (torch.randn(s, generator=g, device="cuda") for s in shapes)
    if positive:  # an identity feature map with a normaliser needs weights of one sign
        q, k = q.abs(), k.abs()
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


def decays(shape):
    """Log-decays of heads with a memory of 10 to 50 tokens."""
    return -0.02 - 0.08 * torch.rand(shape, device="cuda")


def line(n):
    """cosFormer's angles for a length of n."""
    return torch.arange(n, dtype=torch.float64, device="cuda")[None] * (math.pi / 2 / n)


def run(function, inputs, do, **options):
    """The output and its gradients in q, k, v, and in the decay if it is learned."""
    if options.get("log_decay") is not None:
        wide = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
        learns = options["log_decay"].requires_grad
        options["log_decay"] = options["log_decay"].detach().to(wide).requires_grad_(learns)
        leaves = [*inputs, options["log_decay"]] if learns else inputs
    else:
        leaves = inputs
    o = function(*inputs, **options)
    o = o[0] if isinstance(o, tuple) else o
    return o.detach(), *torch.autograd.grad(o, leaves, do.to(o))


def errors(got, want):
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(got, want, strict=True)]


CHECKS = {
    "elu1": dict(feature="elu1"),
    "elu1 d96": dict(feature="elu1", d=96),
    "elu1 d128": dict(feature="elu1", d=128),
    "elu1 d256": dict(feature="elu1", d=256, n=700),
    "elu1 d16": dict(feature="elu1", d=16),
    "elu1 r64 e128": dict(feature="elu1", e=128),
    "identity": dict(positive=True),
    "relu": dict(feature="relu"),
    "exp": dict(feature="exp"),
    "unnormalised": dict(normalise=False),
    "decay a head": dict(feature="elu1", decay="head"),
    "decay a token": dict(feature="elu1", decay="token"),
    "retention": dict(decay="head", normalise=False),
    "retention, learned": dict(decay="head", normalise=False, learned=True),
    "decay, learned": dict(feature="elu1", decay="head", learned=True),
    "cosformer": dict(feature="relu", turned=True),
    "cosformer d128": dict(feature="relu", turned=True, d=128),
    "cosformer d16": dict(feature="relu", turned=True, d=16),
    "cosformer n63": dict(feature="relu", turned=True, n=63),
    "shared heads": dict(feature="elu1", Hkv=1),
    "packed": dict(feature="elu1", segments=True),
    "packed decay": dict(feature="elu1", segments=True, decay="token"),
    "not causal": dict(feature="elu1", causal=False),
    "elu1 n63": dict(feature="elu1", n=63),
    "elu1 fp16": dict(feature="elu1", dtype=torch.float16),
    "elu1 fp16 d128": dict(feature="elu1", dtype=torch.float16, d=128),
    "elu1 fp32": dict(feature="elu1", dtype=torch.float32),
    "elu1 fp32 d128": dict(feature="elu1", dtype=torch.float32, d=128),
    "elu1 fp32 d256": dict(feature="elu1", dtype=torch.float32, d=256, n=700),
    "decay fp32": dict(feature="elu1", dtype=torch.float32, decay="token"),
}


def check(share=(0, 1), only=None) -> dict:
    """Relative errors of o, dq, dk, dv (and of a learned decay) against float64, beside the naive computation's."""
    torch.backends.cuda.matmul.allow_tf32 = False
    table = {}
    for name, case in list(CHECKS.items())[share[0] :: share[1]]:
        if only and not any(x in name for x in only):
            continue
        case = dict(case)
        n, d, dtype = case.pop("n", 1000), case.pop("d", 64), case.pop("dtype", torch.bfloat16)
        Hkv, e, positive = case.pop("Hkv", 2), case.pop("e", None), case.pop("positive", False)
        decay, segments = case.pop("decay", None), case.pop("segments", False)
        learned, turned = case.pop("learned", False), case.pop("turned", False)
        # the gradient of a decay is one number per head; the ratio of two single errors is not meaningful
        heads = 16 if learned else 2
        inputs = draw(2, heads, n, d, Hkv=heads if learned else Hkv, e=e, dtype=dtype, positive=positive)
        do = torch.randn(2, heads, n, e or d, device="cuda")
        if decay:
            case["log_decay"] = decays((heads,) if decay == "head" else (2, heads, n)).requires_grad_(learned)
        if turned:
            case["angles"] = line(n)
        if segments:
            lengths = torch.tensor([300, 1, 400, n - 701], device="cuda")
            case["segments"] = torch.arange(4, device="cuda").repeat_interleave(lengths).repeat(2, 1)
            case["segments"][0, -50:] = -1
        try:
            want = run(naive, [x.detach().double().requires_grad_() for x in inputs], do, **case)
            got = run(fused.chunked_linear, inputs, do, **case)
            again = run(fused.chunked_linear, inputs, do, **case)
            mine, theirs = errors(got, want), errors(run(naive, inputs, do, **case), want)
        except Exception as error:
            print(f"{name:18s} FAILED {type(error).__name__} {str(error)[:300]}", flush=True)
            table[name] = dict(failed=str(error)[:300])
            continue
        same = all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
        ratio = max(x / y for x, y in zip(mine, theirs, strict=True))
        table[name] = dict(error=mine, naive=theirs, worst_ratio=ratio, bit_equal=same)
        text = " ".join(f"{x:.1e}/{y:.1e}" for x, y in zip(mine, theirs, strict=True))
        verdict = "ok " if ratio <= 2 and same else "BAD"
        print(f"{name:18s} {verdict} x{ratio:.2f} bit_equal={same} {text}", flush=True)
    return table


def long_check(n=131072) -> dict:
    """Show whether the error grows with n: all rows and the last 1024 against the float64 reference on the device."""
    table = {}
    for length in (2048, 16384, n):
        for name, heads, case in (
            ("elu1", 2, dict(feature="elu1")),
            ("retention, learned", 16, dict(normalise=False, log_decay=decays(16).requires_grad_())),
        ):
            inputs = draw(1, heads, length, 64)
            do = torch.randn(1, heads, length, 64, device="cuda")
            exact = [x.detach().double().requires_grad_() for x in inputs]
            want = run(reference.chunked_linear, exact, do, **case)
            got = run(fused.chunked_linear, inputs, do, **case)
            tail = errors([got[0][:, :, -1024:]], [want[0][:, :, -1024:]])
            table[f"{name} {length}"] = dict(error=errors(got, want), last_rows=tail[0])
            text = " ".join(f"{x:.1e}" for x in errors(got, want))
            print(f"n {length:7d} {name:18} errors {text} last rows {tail[0]:.1e}", flush=True)
    return table


WORK = {
    "elu1 B1 N65536 d64": dict(B=1, n=65536, feature="elu1"),
    "elu1 B4 N8192 d64": dict(B=4, n=8192, feature="elu1"),
    "elu1 B8 N2048 d64": dict(B=8, n=2048, feature="elu1"),
    "identity unnormalised B1 N65536 d64": dict(B=1, n=65536, normalise=False),
    "retention B1 N65536 d64": dict(B=1, n=65536, normalise=False, decay=True),
    "retention, learned decay B1 N65536 d64": dict(B=1, n=65536, normalise=False, decay=True, learned=True),
    "cosformer B1 N65536 d64": dict(B=1, n=65536, feature="relu", turned=True),
    "cosformer, features given B1 N65536 d64": dict(B=1, n=65536, feature="cosformer"),
    "cosformer B4 N8192 d64": dict(B=4, n=8192, feature="relu", turned=True),
    "cosformer, features given B4 N8192 d64": dict(B=4, n=8192, feature="cosformer"),
    "cosformer B1 N65536 d128 H8": dict(B=1, n=65536, feature="relu", turned=True, d=128, H=8),
    "elu1 B1 N65500 d64": dict(B=1, n=65500, feature="elu1"),
    "elu1 B1 N65536 d128 H8": dict(B=1, n=65536, feature="elu1", d=128, H=8),
    "elu1 B1 N65536 d96": dict(B=1, n=65536, feature="elu1", d=96),
    "elu1 B1 N16384 d256 H8": dict(B=1, n=16384, feature="elu1", d=256, H=8),
    "elu1 B1 N65536 d32": dict(B=1, n=65536, feature="elu1", d=32),
    "elu1 not causal B1 N65536 d64": dict(B=1, n=65536, feature="elu1", causal=False),
    "elu1 packed B1 N65536 d64": dict(B=1, n=65536, feature="elu1", packed=1000),
    "elu1 H16 Hkv4 B1 N65536 d64": dict(B=1, n=65536, feature="elu1", Hkv=4),
    "elu1 fp32 B1 N65536 d64": dict(B=1, n=65536, feature="elu1", dtype=torch.float32),
    "elu1 fp16 B1 N65536 d64": dict(B=1, n=65536, feature="elu1", dtype=torch.float16),
}


def prepare(work):
    work = dict(work)
    B, H, n, d = work.pop("B"), work.pop("H", 16), work.pop("n"), work.pop("d", 64)
    inputs = draw(B, H, n, d, Hkv=work.pop("Hkv", None), dtype=work.pop("dtype", torch.bfloat16))
    if work.pop("decay", False):
        work["log_decay"] = torch.log1p(-(2.0 ** -(5 + torch.arange(H, device="cuda") % 8)))
        work["log_decay"].requires_grad_(work.pop("learned", False))
    if work.pop("turned", False):
        work["angles"] = line(n)
    if packed := work.pop("packed", 0):
        work["segments"] = (torch.arange(n, device="cuda") // packed).expand(B, n).contiguous()
    return inputs, work


def median(function, milliseconds=100):
    return do_bench(function, warmup=25, rep=milliseconds, return_mode="median")


def copy_bandwidth():
    x = torch.randn(2**30, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / median(lambda: y.copy_(x)) / 1e9  # TB/s


def floors(inputs, bandwidth):
    """Lower bounds in ms: to move q, k, v, o once; and with backward, also q, k, v, o, do, dq, dk, dv once."""
    q, k, v = inputs
    o = q.shape[0] * q.shape[1] * q.shape[2] * v.shape[3] * q.element_size()
    forward = q.nbytes + k.nbytes + v.nbytes + o
    return forward / bandwidth / 1e9, (2 * forward + o + q.nbytes + k.nbytes + v.nbytes) / bandwidth / 1e9


def timed(function, inputs, learned=()):
    """ms forward, ms forward + backward (including parameters), and peak GiB of the latter beyond its inputs."""
    do = None

    def forward():
        with torch.no_grad():
            return function(*inputs)

    def both():
        o = function(*inputs)
        return torch.autograd.grad(o, [*inputs, *learned], do)

    do = torch.randn_like(forward())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return median(forward), median(both), peak


def peer(work):
    """The same work by flash-linear-attention, with the token axis before the head axis."""
    if "fla" not in sys.modules:  # load only its kernels: its __init__ imports models and transformers
        package = types.ModuleType("fla")
        package.__path__ = importlib.util.find_spec("fla").submodule_search_locations
        package.__version__ = importlib.metadata.version("fla-core")
        sys.modules["fla"] = package
    if work.get("decay"):
        from fla.ops.retention import chunk_retention

        return lambda q, k, v: chunk_retention(q, k, v, scale=1.0)[0]
    from fla.ops.linear_attn import chunk_linear_attn

    normalise = work.get("normalise", True)
    if work.get("feature") == "elu1":
        elu = torch.nn.functional.elu
        return lambda q, k, v: chunk_linear_attn(elu(q) + 1, elu(k) + 1, v, scale=1.0, normalize=normalise)[0]
    return lambda q, k, v: chunk_linear_attn(q, k, v, scale=1.0, normalize=normalise)[0]


def output_of(q, k, v, **options):
    if options.get("feature") == "cosformer":  # its features are computed in torch
        turns = [f(line(q.shape[2]))[:, None, :, None].to(q.dtype) for f in (torch.cos, torch.sin)]
        q, k = (torch.cat([x.relu() * turn for turn in turns], -1) for x in (q, k))
        options["feature"] = "identity"
    return fused.chunked_linear(q, k, v, **options)[0]


def bench(path, peers=(), only=None) -> None:
    bandwidth = copy_bandwidth()
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    result = dict(device=driver, torch=torch.__version__, triton=triton.__version__)
    result.update(copy_TBps=bandwidth, rows=[])
    print(f"{driver}, copy {bandwidth:.2f} TB/s", flush=True)
    for name, work in WORK.items():
        if only and not any(x in name for x in only):
            continue
        inputs, options = prepare(work)
        low, lows = floors(inputs, bandwidth)
        row = dict(work=name, floor_ms=low, floor_both_ms=lows)
        try:
            mine = functools.partial(output_of, **options)
            decay = options.get("log_decay")
            f, fb, gib = timed(mine, inputs, [] if decay is None or not decay.requires_grad else [decay])
            row.update(forward_ms=f, both_ms=fb, peak_GiB=gib, ratio=f / low, ratio_both=fb / lows)
            print(
                f"{name:38s} {f:.3f} / {fb:.3f} ms  floor {low:.3f} / {lows:.3f}"
                f"  x{f / low:.1f} / x{fb / lows:.1f}  {gib:.2f} GiB",
                flush=True,
            )
        except Exception as error:
            row["failed"] = str(error)[:200]
            print(f"{name:38s} FAILED {str(error)[:200]}", flush=True)
        if name in peers:
            swapped = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs]
            try:
                f, fb, gib = timed(peer(work), swapped)
                row.update(fla_forward_ms=f, fla_both_ms=fb, fla_peak_GiB=gib)
                print(f"{'  flash-linear-attention':38s} {f:.3f} / {fb:.3f} ms  {gib:.2f} GiB", flush=True)
            except Exception as error:
                row["fla_failed"] = str(error)[:200]
                print(f"  fla FAILED {str(error)[:200]}", flush=True)
        result["rows"].append(row)
        if path:
            Path(path).write_text(json.dumps(result, indent=1))
        del inputs
    return result


def recorded(work):
    """Records the launches of one forward and backward pass, to repeat them with other configurations."""
    found = []
    real = launches.launch

    def recording(setup, key, pointers, describe):
        found.append((setup, pointers, describe))
        real(setup, key, pointers, describe)

    inputs, options = prepare(work)
    launches.SETUPS.clear()
    launches.launch = recording
    try:
        o = fused.chunked_linear(*inputs, **options)[0]
        torch.autograd.grad(o, inputs, torch.randn_like(o))
    finally:
        launches.launch = real
    return found


TUNED = {
    "d64": dict(B=1, n=65536, feature="elu1"),
    "d128": dict(B=1, n=16384, feature="elu1", d=128),
    "d256": dict(B=1, n=16384, feature="elu1", d=256),
    "cosformer d64": dict(B=1, n=65536, feature="relu", turned=True),
    "cosformer d128": dict(B=1, n=16384, feature="relu", turned=True, d=128),
}


def features_of(work) -> int:
    return work.get("d", 64) * (2 if work.get("turned") else 1)


def grid(width):
    """Configurations to try: fewer registers per thread allow more programs per multiprocessor."""
    if width == 64:
        found = itertools.product((64,), (4, 8), (2, 3, 4))
        found = [*found, *itertools.product((64,), (4,), (2, 3), (128, 168))]
    elif width == 128:
        found = itertools.product((64, 128), (4, 8), (2, 3))
        found = [*found, (128, 8, 1), (64, 4, 2, 168)]
    else:
        found = [*itertools.product((32, 64), (4, 8), (2,)), (64, 8, 1), (128, 8, 1)]
    return [launches.Config(*x) for x in found]


def tune(names, blocks, spans, workers) -> None:
    """Compile all configurations in parallel processes, then time them one after the other."""
    flags = [sys.executable, __file__, "--tune", *names, "--blocks", *map(str, blocks)]
    flags += ["--spans", *map(str, spans)] if spans else []
    shares = [[*flags, "--share", str(i), str(workers)] for i in range(workers)]
    for child in [subprocess.Popen(share, stdout=subprocess.DEVNULL) for share in shares]:
        child.wait()
    for name in names:
        tuned = [launch_all(name, block, span) for block in blocks for span in spans or [None]]
        print(f"{name}: {min(tuned):.3f} ms in all launches with the best of each", flush=True)


def launch_all(name, block, span, share=None) -> float:
    """Time every launch in every configuration; return the sum of the best ms. With a share (i, of), only compile.

    The table's configuration runs first; the buffers that the others write are compared with its buffers.
    """
    work, usual_block, usual_span = TUNED[name], dict(launches.BLOCKS), launches.span
    kind = max(64, features_of(work)), "bf16"
    ours = launches.BLOCKS[kind] == block
    launches.BLOCKS[kind] = block
    if span:
        launches.span = lambda *_: span
    found, best, chosen = recorded(work), 0.0, 0.0
    launches.BLOCKS, launches.span = usual_block, usual_span
    for position, (setup, pointers, describe) in enumerate(found):
        launch = describe()[0]
        if launch == "scan":
            continue
        table = setup.configs[launch]
        every = dict.fromkeys([table, *grid(kind[0])])
        rows, want = [], None
        for number, config in enumerate(every):
            if share and (number + position) % share[1] != share[0]:
                continue
            ms = time_of(setup, pointers, describe, config, share is None)
            if ms is None:
                continue
            rows.append((ms, config))
            if want is None:
                want = [x.clone() for x in pointers]
            elif (off := max(map(apart, pointers, want))) > 0.01:
                print(f"{name} {launch} {tuple(config)}: WRONG by {off:.1e} beside the table's", flush=True)
        if share or not rows:
            continue
        rows.sort(key=lambda row: row[0])
        best += rows[0][0]
        chosen += next((ms for ms, config in rows if config == table), math.inf)
        label = " ".join([launch, *(x for x in ("DK", "DV") if describe()[-1].get(x))])
        for ms, config in [*rows[:2], *(row for row in rows[2:] if row[1] == table)]:
            mark = "  the table's" if ours and config == table else ""
            print(f"{name} block {block} span {setup.span}  {label:10s} {ms:.4f} ms  {tuple(config)}{mark}", flush=True)
    if not share:
        print(f"{name} block {block}: {best:.3f} ms, as in the table {chosen:.3f}", flush=True)
    return best


def apart(x, y) -> float:
    """‖x − y‖ / ‖y‖ of two buffers; unwritten entries may have any value."""
    x, y = (a.float().nan_to_num(0, 0, 0) for a in (x, y))
    return ((x - y).norm() / y.norm().clamp(min=1e-30)).item()


def time_of(setup, pointers, describe, config, timing) -> float | None:
    """ms of one launch in a configuration; None if it is only compiled, or does not fit."""
    usual = setup.configs
    try:
        setup.configs = {**usual, describe()[0]: config}
        described = describe()
        constants = described[-1]
        if constants["PARTS"] > 1 and constants.get("DK") and constants.get("DV"):
            return None  # both gradients at once need a program that holds the whole state
        program = launches.first(setup, pointers, *described)
        torch.cuda.synchronize()
        return median(functools.partial(program, *(x.data_ptr() for x in pointers)), 10) if timing else None
    except Exception as error:
        if timing:
            print(describe()[0], tuple(config), type(error).__name__, str(error)[:80], flush=True)
        return None
    finally:
        setup.configs = usual


def profile(repeats=300) -> None:
    """Profile the CPU time of a call that is too small to hide it."""
    import cProfile
    import pstats
    import time

    inputs, options = prepare(dict(B=8, n=2048, feature="elu1"))
    do = torch.randn_like(inputs[0])

    def forward():
        with torch.no_grad():
            fused.chunked_linear(*inputs, **options)

    def both():
        torch.autograd.grad(fused.chunked_linear(*inputs, **options)[0], inputs, do)

    for function in (forward, both):
        function()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        whole = time.perf_counter() - start
        host, whole = host / repeats * 1e6, whole / repeats * 1e6
        print(f"{function.__name__} host {host:.0f} us, with device {whole:.0f} us", flush=True)
    watch = cProfile.Profile()
    watch.runcall(lambda: [forward() for _ in range(repeats)])
    pstats.Stats(watch).sort_stats("tottime").print_stats(14)


def main() -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--tune", nargs="+", choices=TUNED, metavar="WORK", help=f"of {', '.join(TUNED)}")
    parser.add_argument("--blocks", type=int, nargs="+", default=[64], help="tokens a block to try")
    parser.add_argument("--spans", type=int, nargs="*", default=[], help="tokens a chunk to try instead of the usual")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile; 0 where it is done")
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--bench", metavar="JSON")
    parser.add_argument("--only", nargs="*", metavar="WORD", help="checks and works whose names have one of these")
    parser.add_argument("--peer", nargs="*", default=[], help="names of works to run through fla too")
    parser.add_argument("--programs", type=int, help="chunks in flight to aim for")
    given = parser.parse_args()
    if given.programs:
        launches.PROGRAMS = given.programs
    if given.share and given.tune:
        for name, block, span in itertools.product(given.tune, given.blocks, given.spans or [None]):
            launch_all(name, block, span, given.share)
        return
    if given.profile:
        profile()
    result = {}
    if given.check:
        result["check"] = check(given.share or (0, 1), given.only)
    if given.long:
        result["long"] = long_check()
    if given.tune:
        tune(given.tune, given.blocks, given.spans, given.workers)
    if given.bench:
        bench(given.bench, given.peer, given.only)
        if result:
            path = Path(given.bench)
            path.write_text(json.dumps({**json.loads(path.read_text()), **result}, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
