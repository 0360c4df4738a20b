"""Gated linear attention on a GPU, one gate per channel: the errors and times in its README.

    python benchmarks/gpu_gated_linear.py                      both, in about a minute
    python benchmarks/gpu_gated_linear.py --errors float32     only errors, of cases with this word in their name
    python benchmarks/gpu_gated_linear.py --times d128         only times, of workloads with this word in their name
    python benchmarks/gpu_gated_linear.py --times d64 --reference     also times of the torch reference

Errors are ‖x − x₆₄‖ / ‖x₆₄‖ of the output and of every gradient, where x₆₄ is the dense definition in float64. Beside
them are the naive errors: the dense definition in the precision of the inputs (sums of gates in float32). A case is ok
if no error is more than twice the naive one and two calls give the same bits. Each case runs in a separate process, so
cases compile in parallel, and one that crashes the GPU context does not affect the others. Times are medians of
`do_bench`, forward and both passes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
import triton
from triton.testing import do_bench

from heedful.kernels.gated_linear import reference
from heedful.kernels.gated_linear import triton as fused

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = {
    "bfloat16 d64": dict(n=256),
    "bfloat16 d64 strong gates": dict(n=256, strength=1.0),
    "bfloat16 r48 e80 relu normalised": dict(n=333, r=48, e=80, feature="relu", normalise=True),
    "bfloat16 d128 shut": dict(n=512, r=128, e=128, shut=True),
    "bfloat16 d128 elu1 normalised segments": dict(n=250, r=128, e=128, feature="elu1", normalise=True, segments=True),
    "float16 d64 elu1 normalised": dict(n=300, feature="elu1", normalise=True, dtype=FP16),
    "float16 d128 elu1 normalised": dict(n=300, r=128, e=128, feature="elu1", normalise=True, dtype=FP16),
    "float32 d64 segments shut": dict(n=300, segments=True, shut=True, dtype=FP32),
    "float32 d128 elu1 normalised": dict(n=200, r=128, e=128, feature="elu1", normalise=True, dtype=FP32),
    "float32 r100 e128 segments shut": dict(n=300, r=100, e=128, segments=True, shut=True, dtype=FP32),
    "bfloat16 d64 n 16384": dict(n=16384, B=1, against=reference.gated_linear),
    "bfloat16 d64 n 131072": dict(n=131072, B=1, against=reference.gated_linear),
}
WORKS = {
    "B1 N65536 d64 bfloat16": (1, 65536, 64, BF16),
    "B4 N8192 d64 bfloat16": (4, 8192, 64, BF16),
    "B4 N8192 d128 bfloat16": (4, 8192, 128, BF16),
    "B4 N8192 d64 float32": (4, 8192, 64, FP32),
    "B4 N8192 d128 float32": (4, 8192, 128, FP32),
}


def draw(B, H, n, r, e, dtype, *, positive=False, shut=False, strength=1 / 16):
    """q, k, v and log-gates: mild gates, as in a trained model, and optionally a few closed ones."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, u = (torch.randn(B, H, n, w, generator=generator, device="cuda") for w in (r, r, e, r))
    # a normaliser needs weights of one sign
    q, k = (0.3 * q + 0.5, 0.3 * k + 0.5) if positive else (q * r**-0.5, k)
    gates = F.logsigmoid(u) * strength
    return *(x.to(dtype) for x in (q, k, v)), torch.where(u < -1.8, -torch.inf, gates) if shut else gates


def dense(q, k, v, *, log_decay, feature, normalise, segments):
    """The definition, with the factors of all pairs materialised; everything in the dtype of q except sums of gates."""
    B, _, n, _ = q.shape
    ids = torch.zeros(B, n, dtype=torch.long, device=q.device) if segments is None else segments
    real = ids >= 0
    x, y = (F.elu(a) + 1 if feature == "elu1" else a.relu() if feature == "relu" else a for a in (q, k))
    gates = log_decay.masked_fill(~real[:, None, :, None], 0)
    shut = gates == -torch.inf
    fades, shuts = gates.masked_fill(shut, 0).cumsum(-2), shut.double().cumsum(-2)
    sees = (ids[:, :, None] == ids[:, None]) & real[:, None] & torch.ones(n, n, device=q.device).tril().bool()
    open_ = sees[:, None, ..., None] & (shuts[..., :, None, :] == shuts[..., None, :, :])
    factors = torch.where(open_, fades[..., :, None, :] - fades[..., None, :, :], -torch.inf).exp().to(q.dtype)
    weights = torch.einsum("bhic,bhijc,bhjc->bhij", x, factors, y)
    below = weights.sum(-1, keepdim=True)
    return weights @ v / below.masked_fill(below == 0, 1) if normalise else weights @ v


def outcome(function, inputs, dtype, **options):
    """The output and the gradients in q, k, v and the gates."""
    leaves = [x.detach().to(dtype) for x in inputs[:3]] + [inputs[3].to(torch.promote_types(dtype, FP32))]
    leaves = [x.clone().requires_grad_() for x in leaves]
    o = function(*leaves[:3], log_decay=leaves[3], **options)
    o = o[0] if isinstance(o, tuple) else o
    generator = torch.Generator("cuda").manual_seed(1)
    do = torch.randn(o.shape, generator=generator, device="cuda").to(inputs[0].dtype)
    return o.detach(), *torch.autograd.grad(o, leaves, do.to(o))


def errors(name) -> None:
    case = dict(CASES[name])
    n, r, e, B = case.pop("n"), case.pop("r", 64), case.pop("e", 64), case.pop("B", 2)
    dtype, against = case.pop("dtype", BF16), case.pop("against", dense)
    feature, normalise = case.pop("feature", "identity"), case.pop("normalise", False)
    segments = None
    if case.pop("segments", False):
        lengths = torch.tensor([n // 3, 5, 9, n - n // 3 - 20, 6], device="cuda")
        segments = torch.tensor([0, -1, 0, 3, -1], device="cuda").repeat_interleave(lengths).repeat(B, 1)
    inputs = draw(B, 2, n, r, e, dtype, positive=normalise, **case)
    options = dict(feature=feature, normalise=normalise, segments=segments)
    mine, again = (outcome(fused.gated_linear, inputs, dtype, **options) for _ in range(2))
    exact = outcome(against, inputs, torch.float64, **options)
    pairs = [[relative(x, z)] for x, z in zip(mine, exact, strict=True)]
    if against is dense:
        for pair, x, z in zip(pairs, outcome(dense, inputs, dtype, **options), exact, strict=True):
            pair.append(relative(x, z))
    right = all(pair[0] <= 2 * pair[-1] for pair in pairs)
    same = all(torch.equal(x, y) for x, y in zip(mine, again, strict=True))
    texts = ["/".join(f"{x:.1e}" for x in pair) for pair in pairs]
    found = "  ".join(f"{x} {text}" for x, text in zip(("o", "dq", "dk", "dv", "dg"), texts, strict=True))
    print(f"{name:40s} {'ok ' if right and same else 'BAD'} bit-equal {same}  {found}", flush=True)


def relative(x, y) -> float:
    return ((x.double() - y).norm() / y.norm()).item()


def times(name, with_reference) -> None:
    B, n, d, dtype = WORKS[name]
    leaves = [x.requires_grad_() for x in draw(B, 16, n, d, d, dtype)]
    do = torch.randn_like(leaves[2])
    for form in (fused, reference) if with_reference else (fused,):

        def forward(form=form):
            return form.gated_linear(*leaves[:3], log_decay=leaves[3])[0]

        def both(form=form, forward=forward):
            torch.autograd.grad(forward(form), leaves, do)

        start = time.perf_counter()
        both()
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        with torch.no_grad():
            alone = do_bench(forward, warmup=10, rep=50, return_mode="median")
        together = do_bench(both, warmup=10, rep=50, return_mode="median")
        label = f"H16 {name}" + ("" if form is fused else ", torch reference")
        print(f"{label:45s} {alone:.3f} / {together:.3f} ms; the first call {first:.1f} s", flush=True)


def chosen(table, words):
    return [name for name in table if not words or any(word in name for word in words)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errors", nargs="*", metavar="WORD")
    parser.add_argument("--times", nargs="*", metavar="WORD")
    parser.add_argument("--reference", action="store_true", help="time the torch reference too: a second a call")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if given.case:
        errors(given.case)
        return
    everything = given.errors is None and given.times is None
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    if everything or given.errors is not None:
        names = chosen(CASES, given.errors)
        running = [subprocess.Popen([sys.executable, __file__, "--case", name]) for name in names]
        for name, process in zip(names, running, strict=True):
            if process.wait():
                print(f"{name:40s} FAILED", flush=True)
    if everything or given.times is not None:
        for name in chosen(WORKS, given.times):
            times(name, given.reference)


if __name__ == "__main__":
    main()
