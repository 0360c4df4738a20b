"""The statistics of random features, measured over fixed seeds beside their closed forms.

    python benchmarks/random_features.py

Bias, variance, the order of the kinds on anisotropic data, the optimum of each fit, orthogonal and Hadamard rows.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from pathlib import Path

import torch

from heedful.random_features import (
    FavorPlus,
    Moments,
    variance_favor_plus,
    variance_favor_plus_orthogonal,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from test_random_features import (
    CASES,
    FITS,
    anisotropic,
    estimates,
    excesses,
    fits_of,
    mean_and_error,
    measured,
    measured_relative_variance,
    pair,
    products,
    relative_variances,
    unit_rows,
    variance_and_error,
)


def main() -> None:
    torch.set_num_threads(1)
    bias()
    variances()
    order()
    optimum()
    orthogonal()
    hadamard()


def bias() -> None:
    print("bias: FAVOR+ at x = y, ‖x‖ = 1, d = m = 64, 2000 draws; target e = 2.7183")
    x, y = pair(64, 1.0, 1.0, 1.0)
    right = FavorPlus(64, 64, seed=17, scale=1.0, heads=2000).double()
    for name, phi in (("χ norms", right), ("unit norms", unit_rows(right))):
        mean, error = mean_and_error(products(phi, x, y))
        print(
            f"  orthogonal rows, {name:12}{mean:9.4f} ± {error:.4f}{(mean - math.e) / error:11.1f} standard errors off"
        )


def variances() -> None:
    print("\nvariance: closed form | measured over 100,000 draws ± standard error (how many of them apart)")
    for case in CASES:
        d, m, long, short, cosine = case
        print(f"  d = {d}, m = {m}, ‖x‖ = {long}, ‖y‖ = {short}, cos = {cosine}")
        for name, (exact, found, error) in measured(case).items():
            print(f"    {name:12}{exact:10.5f} |{found:10.5f} ± {error:.5f}  ({(found - exact) / error:+.1f})")


def order() -> None:
    for size in (1.0, 0.5):
        x, y = (size * u for u in anisotropic(30, 16))
        print(f"\nrelative variance of one feature on anisotropic data (d = 16, 30 × 30 pairs, times {size})")
        print(
            f"  {'':8}{'mean of log(1 + ·)':>20}{'median':>10}{'mean':>12}" + (f"{'measured':>12}" if size < 1 else "")
        )
        for name, fit in fits_of(x, y).items():
            exact = relative_variances(fit, x, y)
            row = f"  {name:8}{exact.log1p().mean():20.3f}{exact.median():10.3f}{exact.mean():12.3f}"
            if size < 1:
                row += "{:12.3f} ± {:.3f}".format(*measured_relative_variance(fit, x, y))
            print(row)


def optimum() -> None:
    print("\noptimum: 300 random perturbations of each fit (0.1 % to 100 %), excess of the objective over the fit's")
    moments = Moments.of(*anisotropic(200, 6))
    for kind in FITS:
        found = excesses(kind, moments)
        better = sum(excess <= 0 for excess in found)
        print(f"  {kind:8}{better} better; least excess {min(found):.1e}, median {statistics.median(found):.1e}")


def orthogonal() -> None:
    print("\northogonal rows, FAVOR+, ‖x‖ = ‖y‖ = 0.5, cos = 0.3: variance, 100,000 draws")
    print(f"  {'d':>4}{'m':>4}{'independent':>13}{'orthogonal':>13}{'measured':>13}")
    for d, m in ((4, 4), (8, 5), (4, 11), (16, 16)):
        x, y = pair(d, 0.5, 0.5, 0.3)
        exact, independent = variance_favor_plus_orthogonal(x, y, m), variance_favor_plus(x, y, m)
        found, error = variance_and_error(estimates(FavorPlus, x, y, m, 100_000))
        print(f"  {d:4}{m:4}{independent:13.5f}{exact:13.5f}{found:13.5f} ± {error:.5f}")


def hadamard() -> None:
    print("\nHadamard rows, FAVOR+, m = d, ‖x‖ = ‖y‖ = 0.7 along mixed and along single axes: relative bias")
    for d in (4, 8, 16, 64):
        draws = 400_000 // d
        mixed, single = pair(d, 0.7, 0.7, 0.4), (0.7 * torch.eye(d).double()[0],) * 2
        row = f"  d = {d:3}"
        for x, y in (mixed, single):
            sample = estimates(FavorPlus, x, y, d, draws, orthogonal="hadamard") / math.exp(x @ y)
            row += "{:+10.4f} ± {:.4f}".format(*mean_and_error(sample - 1))
        print(row)
    print("  milliseconds to project 8192 tokens, float32, one thread (median of 5)")
    for d, m in ((64, 256), (256, 256), (1024, 1024)):
        x = torch.randn(8192, d, generator=torch.Generator().manual_seed(0))
        dense, structured = (FavorPlus(d, m, orthogonal=kind).projection for kind in (True, "hadamard"))
        print(f"    d = {d:4}, m = {m:4}: matrix {median_ms(dense, x):7.1f}, Hadamard {median_ms(structured, x):7.1f}")


def median_ms(call, x: torch.Tensor) -> float:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        call(x)
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds)


if __name__ == "__main__":
    main()
