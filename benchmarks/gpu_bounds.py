"""Run every Triton kernel once, at small and odd sizes, forward and backward, under compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python benchmarks/gpu_bounds.py [NAME …]

Without torch's cache every tensor is a separate allocation, so the sanitizer (pip install nvidia-cuda-sanitizer-api)
sees every access beyond its end. Catalogue entries without a Triton kernel are left out, and counted. Results are
checked elsewhere (gpu_check.py); here they only have to be finite.
"""

from __future__ import annotations

import argparse

import torch

import heedful as h
from heedful.core import RecurrentMechanism
from heedful.measures import positional_pattern

SIZES = ((1, 16), (77, 40), (130, 32), (200, 64))  # tokens, width
DTYPES = (torch.bfloat16, torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these entries alone")
    options = parser.parse_args()
    ran = 0
    for name in options.names or h.CATALOG:
        calls = sum(exercised(h.CATALOG[name], n, d, dtype) for n, d in SIZES for dtype in DTYPES)
        ran += calls > 0
        print(f"{name:22} {calls} calls by Triton", flush=True)
    print(f"{ran} entries ran on Triton kernels")


def exercised(entry, n: int, d: int, dtype: torch.dtype) -> int:
    """The number of calls that ran on Triton: one sequence, and two packed ones with padding after them."""
    mechanism = entry.sample(d=d, heads=2, length=n).to("cuda", dtype)
    ids = torch.tensor([0] * (n // 3) + [1] * (n // 3) + [-1] * (n - 2 * (n // 3)), device="cuda")
    return sum(attended(mechanism, n, d, dtype, segments) for segments in (None, ids if n > 2 else None))


def attended(mechanism, n: int, d: int, dtype: torch.dtype, segments) -> bool:
    q, k, v = (torch.randn(2, 2, n, d, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    if not mechanism.explain(q, k, v, segments=segments).endswith("triton"):
        return False
    out = mechanism(q, k, v, segments=segments)
    out.sum().backward()
    assert all(x.isfinite().all() for x in (out, *(x.grad for x in (q, k, v) if x.grad is not None)))
    with torch.no_grad():
        if segments is None and isinstance(mechanism, h.Softmax):
            op = mechanism.operator(q, k)
            positional_pattern(op)
            op.mT @ (op @ v)
        if segments is None and isinstance(mechanism, RecurrentMechanism):
            state = mechanism.init_state(q[:, :, :1], k[:, :, :1], v[:, :, :1])
            mechanism.step(state, q[:, :, :1], k[:, :, :1], v[:, :, :1])
    return True


if __name__ == "__main__":
    main()
