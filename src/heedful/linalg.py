"""Singular values of anything with `@` and `.mT`, an operator or a tensor, and what is certain about them.

sketch      U = [U_0 … U_t] orthonormal, W = Aᵀ U,  U_{t+1} R = (1 − U Uᵀ) A W_t              block Lanczos on A Aᵀ
            θ_i = σ_i(W) ≤ σ_i(A),  ‖A‖² = Σ θ_i² + ‖R‖²,  R = (1 − U Uᵀ) A                     (Frobenius norms)
floor       Σ_{i≤r} σ_i² ≥ Σ_{i≤r} θ_i², and since these sums are concave in r and end at ‖A‖², above the chord too
ceiling     Σ_{i≤r} σ_i² ≤ Σ_{i≤r} θ_i² + min(‖R‖², r ν),  ν ≥ ‖R‖₂²                            Ky Fan: AᵀA = WWᵀ + RᵀR
            Σ_{i≤r} σ_i² ≤ the r largest of {θ_i², i ≤ a} ∪ {s, s, …} + ‖C_a‖_*,  s = max(θ_{a+1}², ν) + ‖C − C_a‖₂
            Ky Fan again, for any a: split A Aᵀ into the first a Ritz vectors and all else. The coupling of the two is
            C_a, the residuals (A Aᵀ − θ_i²) u_i, i ≤ a, and adds its singular values; all else has norm s at most
            Σ_{i≤r} σ_i² ≤ Σ_{i≤r} θ_i² + ‖C_a‖² / (θ_r² − s)  where θ_r² > s
            for λ > s, as many eigenvalues exceed λ as do those of diag(θ_i²) + C_aᵀ (λ − rest)⁻¹ C_a, which is at most
            diag(θ_i²) + C_aᵀC_a / (λ − s)
ν           ‖R‖² always will do; a smaller one comes from Lanczos on R Rᵀ from random starts and holds but for a chosen
            probability of failure (`norm_slack`)
estimate    the sketch starts from A Ω = U_0 S, Ω with p random columns, so it is a quadrature rule as well: for any f
            E tr Ωᵀ Aᵀ f(A Aᵀ) A Ω = p Σ σ_i² f(σ_i²),  the trace is about Σ_i f(θ_i²) ‖Sᵀ y_i‖², y_i the part of the
            i-th Ritz vector in the first block. So ‖Sᵀ y_i‖² / p is the energy near θ_i² (`measures.profile`)

Floor and ceiling hold for whatever U came out: they need it to be orthonormal, not to have converged. All of it is
about A Aᵀ, so pass A with its shorter side first.

Arrays stay where A is; Ritz values and the bounds made from them are float64 on the CPU, since a GPU would spend its
time on launches.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from math import acosh, cosh, inf, log, pi, sqrt
from typing import NamedTuple, Protocol

import torch

from heedful.column_slabs import Trimmed
from heedful.shapes import Float, Int, Tensor

LOST = 8  # epsilons: a direction that is no longer is rounding
GRAM_LINES = 48  # of a Gram matrix that are made at a time at least: fewer cost more each
CHUNK = {"cpu": 1 << 12, "cuda": 1 << 16}  # rows that a product is accumulated over in float64 at a time


class Linear(Protocol):
    """A batch of linear maps: a tensor (*b, n, m), or an operator that never forms one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def mT(self) -> Linear: ...
    def __matmul__(self, x: Tensor, /) -> Tensor: ...


def gram(x: Float[Tensor, "*b k n"], y: Float[Tensor, "*b l n"]) -> Float[Tensor, "*b k l"]:
    """x yᵀ in float64, a stretch of the long axis at a time.

    >>> x = torch.ones(2, 10_000)
    >>> gram(x, x).tolist()
    [[10000.0, 10000.0], [10000.0, 10000.0]]
    """
    step = CHUNK.get(x.device.type, 1 << 12)
    total = x[..., :step].double() @ y[..., :step].double().mT
    for start in range(step, x.shape[-1], step):
        part = slice(start, start + step)
        total += x[..., part].double() @ y[..., part].double().mT
    return total


def orthonormal(
    x: Float[Tensor, "*b n p"], basis: Float[Tensor, "*b k n"], size: Float[Tensor, "*b"], generator: torch.Generator
) -> Float[Tensor, "*b n p"]:
    """An orthonormal basis of x, which was projected once, from `size`, and has no part in `basis` but for rounding.

    Projecting a second time is enough, but for directions that are all rounding: those are drawn anew.
    """
    q, r = torch.linalg.qr(x)
    lost = (r.diagonal(dim1=-2, dim2=-1).abs() <= LOST * torch.finfo(x.dtype).eps * size[..., None])[..., None, :]
    if lost.any():
        fresh = torch.randn(x.shape[-2:], dtype=x.dtype, device=x.device, generator=generator)
        q = torch.where(lost, fresh / sqrt(x.shape[-2]), q)
        q = torch.linalg.qr(q - basis.mT @ (basis @ q))[0]
    inside = q.mT @ basis.mT
    q.mT.sub_(inside @ basis)
    # What is left is orthonormal but for the square of what was inside.
    return q if bool((inside.square().sum((-2, -1)) < torch.finfo(x.dtype).eps).all()) else torch.linalg.qr(q)[0]


def random_signs(m: int, p: int, dtype: torch.dtype, generator: torch.Generator) -> Float[Tensor, "m p"]:
    """Ω, with one entry ±√p in each row, so that E ΩΩᵀ = p; p rows in a row have them in p different columns.

    tr ΩᵀBΩ / p errs by entries of B between rows with one column, never by the diagonal or by near neighbours, where
    attention has most of its weight: a Gaussian Ω errs by all of B.

    >>> start = random_signs(8, 4, torch.float32, torch.Generator().manual_seed(0))
    >>> bool(((start[:4] @ start[:4].mT).abs() == 4 * torch.eye(4)).all())
    True
    """
    device = generator.device
    column = torch.rand(-(-m // p), p, device=device, generator=generator).argsort(-1).flatten()[:m, None]
    signs = torch.randint(0, 2, (m, 1), device=device, generator=generator) * 2 - 1
    return torch.zeros(m, p, dtype=dtype, device=device).scatter(-1, column, signs.to(dtype) * sqrt(p))


class Ritz(NamedTuple):
    """What a sketch says of the first values."""

    squares: Float[Tensor, "*b k"]  # θ_i², each at most σ_i²
    leaks: Float[Tensor, "*b k"]  # the norms of their residuals
    block: int  # the rank that all residuals together have at most
    shares: Float[Tensor, "*b k"]  # the energy near each, as the random start tells


class Sketch:
    """A growing orthonormal basis U of the range of A, with W = Aᵀ U; `grow` adds a block of columns.

    >>> A = torch.diag(torch.tensor([5.0, 4.0, 3.0, 1e-3, 0, 0, 0, 0]))
    >>> sketch = Sketch(A, block=2, most=4)
    >>> sketch.grow(), sketch.grow()
    (None, None)
    >>> [round(float(square), 3) for square in sketch.solve().squares[:3]]
    [25.0, 16.0, 9.0]
    """

    def __init__(self, op: Linear, block: int, most: int, seed: int = 0, empty: Callable[..., Tensor] = torch.empty):
        *batch, n, m = op.shape
        self.op, self.block, self.most, self.seed = op, block, min(most, n), seed
        # Kept with the columns as rows: each one contiguous, and pages not yet grown into cost nothing.
        self._basis = empty(*batch, self.most, n, dtype=op.dtype, device=op.device)
        self._image = empty(*batch, self.most, m, dtype=torch.float64, device=op.device)  # for products with it
        self._gram = empty(*batch, self.most, self.most, dtype=torch.float64, device=op.device)
        self.products = 0
        self._begin()

    def _begin(self) -> None:
        *batch, n, m = self.op.shape
        self.generator = torch.Generator(self.op.device).manual_seed(self.seed)
        self.width, self._summed = 0, 0
        size = m, min(self.block, self.most)
        start = random_signs(*size, self.op.dtype, self.generator)
        self._start = self._next = (self.op @ start).expand(*batch, n, -1)
        self._size = self._next.norm(dim=(-2, -1))
        self.products += start.shape[-1]

    @property
    def basis(self) -> Float[Tensor, "*b k n"]:
        """The columns of U, as rows."""
        return self._basis[..., : self.width, :]

    @property
    def full(self) -> bool:
        return self.width == self.most

    def grow(self) -> None:
        """One block more: as many products with Aᵀ and with A as it has columns."""
        p = min(self.block, self.most - self.width)
        new = slice(self.width, self.width + p)
        u = orthonormal(self._next[..., :p], self.basis, self._size, self.generator)
        w, z = there_and_back(self.op, u)
        self._basis[..., new, :] = u.mT
        self._image[..., new, :] = w.mT
        self.width += p
        # What the next block is made from is also what couples this one to the rest: (1 − U Uᵀ) A W_t.
        self._size = z.norm(dim=(-2, -1))
        self._next = (z.mT.contiguous() - (self.basis @ z).mT @ self.basis).mT
        self.products += 2 * p

    @property
    def gram(self) -> Float[Tensor, "*b k k"]:
        """WᵀW"""
        step = max(self.block, GRAM_LINES)
        for start in range(self._summed, self.width, step):
            new = slice(start, min(start + step, self.width))
            inner = gram(self._image[..., new, :], self._image[..., : new.stop, :])
            self._gram[..., new, : new.stop] = inner
            self._gram[..., : new.stop, new] = inner.mT
        self._summed = self.width
        return self._gram[..., : self.width, : self.width]

    @property
    def captured(self) -> Float[Tensor, "*b"]:
        """Σ θ_i² = ‖W‖²."""
        return self.gram.diagonal(dim1=-2, dim2=-1).sum(-1).cpu()

    @property
    def defect(self) -> Float[Tensor, "*b"]:
        """‖UᵀU − 1‖: how far U is from orthonormal."""
        inner = self.basis @ self.basis.mT
        inner.diagonal(dim1=-2, dim2=-1).sub_(1)
        return torch.linalg.vector_norm(inner, dim=(-2, -1), dtype=torch.float64).cpu()

    def solve(self) -> Ritz:
        """The Ritz values, squared, and the norm of each one's residual (A Aᵀ − θ²) u."""
        squares, vectors = torch.linalg.eigh(self.gram)
        p = self._next.shape[-1]
        # Only the last block has a residual: those before it are in the span of the blocks that they made.
        left = gram(self._next.mT, self._next.mT)
        last = vectors[..., -p:, :]
        leaks = (last * (left @ last)).sum(-2).clamp(min=0).sqrt()
        first = self._start.shape[-1]
        shares = (self._start_in_basis.mT @ vectors[..., :first, :]).square().sum(-2) / first
        squares, leaks, shares = torch.stack([squares.clamp(min=0), leaks, shares]).flip(-1).cpu()
        return Ritz(squares, leaks, p, shares)

    @property
    def _start_in_basis(self) -> Float[Tensor, "*b p p"]:
        start = self._start
        return gram(self._basis[..., : start.shape[-1], :], start.mT)

    def take(self, heads: Int[Tensor, " c"]) -> Sketch:
        """The sketch of some of the heads of a batch (b, n, m)."""
        part = copy(self)
        part.op = taken(self.op, heads)
        for name in ("_basis", "_image", "_gram", "_next", "_size", "_start"):
            setattr(part, name, getattr(self, name)[heads])
        return part


class Probes:
    """Lanczos on R Rᵀ = (1 − U Uᵀ) A Aᵀ (1 − U Uᵀ), the rows of `basis` being U's columns, from random starts.

    Each probe reorthogonalises in full; the probes go through the operator side by side.
    """

    def __init__(self, op: Linear, basis: Float[Tensor, "*b k n"], count: int, seed: int = 1):
        *batch, n, _ = op.shape
        generator = torch.Generator(op.device).manual_seed(seed)
        x = torch.randn(*batch, n, count, dtype=op.dtype, device=op.device, generator=generator)
        for _ in range(2):
            x = x - basis.mT @ (basis @ x)
        self.op, self.basis, self.count = op, basis, count
        self.path = [x / x.norm(dim=-2, keepdim=True).clamp(min=1e-30)]
        self.diagonal: list[Tensor] = []
        self.beside: list[Tensor] = []
        self.products = 0

    def largest(self, steps: int) -> Float[Tensor, "*b"]:
        """The largest Ritz value after so many steps: no more than ‖R‖₂²."""
        while len(self.diagonal) < steps:
            if self.diagonal:
                self._turn()
            self._image = self.op.mT @ self.path[-1]
            self.diagonal.append(self._image.double().square().sum(-2))
            self.products += self.count
        return self._top()

    def _turn(self) -> None:
        """The next direction: A Aᵀ x without what the path and the basis have of it."""
        y = self.op @ self._image
        self.products += self.count
        for _ in range(2):
            y = y - self.basis.mT @ (self.basis @ y)
            y = _without(self.path, y)
        length = y.double().norm(dim=-2)
        # Where the start's own space is used up, what is left is rounding: nothing larger is to be found from there.
        size = torch.stack(self.diagonal).amax(0).clamp(min=1e-30)
        over = length <= 64 * torch.finfo(y.dtype).eps * size
        self.beside.append(torch.where(over, 0, length))
        self.path.append(torch.where(over[..., None, :], 0, y / length.clamp(min=1e-30).to(y.dtype)[..., None, :]))

    def _top(self) -> Float[Tensor, "*b"]:
        tridiagonal = torch.diag_embed(torch.stack(self.diagonal, -1).cpu())
        if self.beside:
            edge = torch.stack(self.beside, -1).cpu()
            tridiagonal = tridiagonal + torch.diag_embed(edge, 1) + torch.diag_embed(edge, -1)
        return torch.linalg.eigvalsh(tridiagonal).amax((-2, -1))


def _without(path: list[Float[Tensor, "*b n p"]], y: Float[Tensor, "*b n p"]) -> Float[Tensor, "*b n p"]:
    """y without its part along each vector of the path, column by column."""
    if y.device.type != "cpu":  # all at once: few launches
        along = torch.stack(path)
        return y - (along * (along * y).sum(-2, keepdim=True)).sum(0)
    for x in path:  # one by one: they stay in the cache, which all of them together do not
        y = y - x * (x * y).sum(-2, keepdim=True)
    return y


def norm_slack(n: int, probes: int, steps: int, failure: float) -> float:
    """ε such that λ₁ ≤ (largest Ritz value) / (1 − ε), but for a probability of `failure`.

    Lanczos from a start that is uniform on the sphere of ℝⁿ, for any positive semidefinite matrix. Take as trial
    polynomial the Chebyshev polynomial of degree k − 1 on [0, (1 − ε) λ₁]. Its Rayleigh quotient is (1 − ε) λ₁ at
    least, unless b² ε T² < 1 − ε, where b is the start's first coordinate and T = cosh(2 (k − 1) artanh √ε) the
    polynomial's value at λ₁. Since P(|b| < c) ≤ c √(2n/π), one probe fails with probability
    √(2n/π) √((1 − ε)/ε) / T at most, and p independent ones with its p-th power.
    (Kuczyński and Woźniakowski 1992 have 1.648 √n exp(−√ε (2k − 1)).)

    >>> round(norm_slack(2048, probes=16, steps=12, failure=1e-9), 3)
    0.088
    """
    if not 0 < failure < 1:
        raise ValueError(f"failure: expected a probability between 0 and 1, got {failure}.")
    allowed = failure ** (1 / probes)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _failure_of_one(middle, n, steps) > allowed:
            low = middle
        else:
            high = middle
    return high


def _failure_of_one(epsilon: float, n: int, steps: int) -> float:
    if not 0 < epsilon < 1:
        return 0.0 if epsilon >= 1 else 1.0
    exponent = (steps - 1) * acosh((1 + epsilon) / (1 - epsilon))
    scale = sqrt(2 * n / pi * (1 - epsilon) / epsilon)
    return 0.0 if exponent > 300 + log(scale + 1) else scale / cosh(exponent)


def floor(squares: Float[Tensor, "*b k"], residual: Float[Tensor, "*b"], n: int) -> Float[Tensor, "*b n"]:
    """Lower bounds of Σ_{i≤r} σ_i² for r = 1 … n, from θ_i² and ‖R‖².

    The true sums are concave in r, pass above Σ_{i≤r} θ_i², and end at the whole: so they pass above the hull of
    both, which follows the θ_i² up to the place from which the chord to the end is flattest.

    >>> floor(torch.tensor([4.0, 1.0]), torch.tensor(2.0), 4).tolist()
    [4.0, 5.0, 6.0, 7.0]
    """
    sums = torch.nn.functional.pad(squares.cumsum(-1), (1, 0))
    total = (sums[..., -1] + residual)[..., None]
    places = torch.arange(sums.shape[-1], device=sums.device)
    slopes = (total - sums) / (n - places).clamp(min=1)
    if sums.shape[-1] == n + 1:
        slopes[..., n] = slopes[..., n - 1]
    slope, place = slopes.min(-1, keepdim=True)
    ranks = torch.arange(1, n + 1, device=sums.device)
    known = torch.nn.functional.pad(sums[..., 1:], (0, n - squares.shape[-1]))
    return torch.where(ranks <= place, known, total - slope * (n - ranks))


def ceiling(
    ritz: Ritz, residual: Float[Tensor, "*b"], norm: Float[Tensor, "*b"], n: int, cut: Cuts | None = None
) -> Float[Tensor, "*b n"]:
    """Upper bounds of Σ_{i≤r} σ_i² for r = 1 … n, from the Ritz values, ‖R‖² and ν ≥ ‖R‖₂².

    >>> exact = Ritz(torch.tensor([4.0, 1.0]), torch.zeros(2), 2, torch.zeros(2))
    >>> ceiling(exact, torch.tensor(2.0), torch.tensor(2.0), 4).tolist()
    [4.0, 6.0, 7.0, 7.0]
    """
    k = ritz.squares.shape[-1]
    sums = torch.nn.functional.pad(ritz.squares.cumsum(-1), (1, 0))
    total = (sums[..., -1] + residual)[..., None]
    ranks = torch.arange(1, n + 1, device=sums.device)
    known = torch.nn.functional.pad(sums[..., 1:], (0, n - k), value=torch.inf)
    known = torch.minimum(known, sums[..., -1:])
    norm = torch.minimum(norm, residual)[..., None]
    best = torch.minimum(known + torch.minimum(ranks * norm, residual[..., None]), total)
    cut = cuts(ritz, norm[..., 0]) if cut is None else cut
    extra = sqrt(ritz.block) * cut.coupling
    before = torch.minimum(ranks[:k], cut.above)
    whole = sums[..., None, :].expand(*cut.above.shape[:-1], -1)
    bounds = whole.gather(-1, before) + (ranks[:k] - before) * cut.level + extra
    best[..., :k] = torch.minimum(torch.minimum(best[..., :k], bounds.amin(-2)), sums[..., 1:] + cut.gained)
    # Beyond the sketch each is a straight line, often above the whole from the start. Those that are not are taken one
    # by one: all at once would wake every thread.
    start = whole.gather(-1, cut.above)
    below = start + (k + 1 - cut.above) * cut.level + extra < total[..., None]
    for at, wanted in enumerate(below.reshape(-1, below.shape[-2]).any(0).tolist()):
        if wanted:
            line = start[..., at, :] + (ranks[k:] - cut.above[..., at, :]) * cut.level[..., at, :] + extra[..., at, :]
            best[..., k:] = torch.minimum(best[..., k:], line)
    return best


def ceilings(ritz: Ritz, norm: Float[Tensor, "*b"], cut: Cuts | None = None) -> Float[Tensor, "*b k"]:
    """Upper bounds of each σ_i² by the same cuts: no eigenvalue moves by more than the coupling's norm.

    >>> ceilings(Ritz(torch.tensor([4.0, 1.0]), torch.zeros(2), 2, torch.zeros(2)), torch.tensor(2.0)).tolist()
    [4.0, 2.0]
    """
    cut = cuts(ritz, norm) if cut is None else cut
    norm = norm[..., None]
    moved = (torch.maximum(ritz.squares[..., None, :], cut.level) + cut.coupling).amin(-2)
    return torch.minimum(torch.minimum(moved, ritz.squares + norm), ritz.squares + cut.gained)


CUTS = 8  # places at which the Ritz values are cut in two, and the best of the bounds taken


class Cuts(NamedTuple):
    """The first a Ritz values and all else, for CUTS different a."""

    level: Float[Tensor, "*b c 1"]  # s
    above: Int[Tensor, "*b c 1"]  # how many of the first a stand above it
    coupling: Float[Tensor, "*b c 1"]  # the Frobenius norm of C_a
    gained: Float[Tensor, "*b k"]  # ‖C_a‖² / (θ_i² − s), the least of them; infinite where no cut has θ_i² > s


def cuts(ritz: Ritz, norm: Float[Tensor, "*b"]) -> Cuts:
    """What `ceiling` and `ceilings` both are made from, ν being at most ‖R‖²."""
    norm = norm[..., None]
    squares, k = ritz.squares[..., None, :], ritz.squares.shape[-1]
    places = torch.tensor(sorted({-(-k * part // CUTS) for part in range(1, CUTS + 1)}))
    below = torch.nn.functional.pad(ritz.squares, (0, 1))[..., places]
    leaked = ritz.leaks.square().cumsum(-1)
    inside = leaked[..., places - 1]
    level = (torch.maximum(below, norm) + (leaked[..., -1:] - inside).clamp(min=0).sqrt())[..., None]
    above = ((squares >= level) & (torch.arange(k) < places[:, None])).sum(-1, keepdim=True)
    gained = torch.where(squares > level, inside[..., None] / (squares - level), inf).amin(-2)
    return Cuts(level, above, inside.sqrt()[..., None], gained)


Matrices = Tensor | Trimmed
"""A batch (b, n, m) that some heads can be taken out of, unlike an operator."""


def taken(op: Linear, heads: Int[Tensor, " c"]) -> Linear:
    """Some of the heads."""
    if not isinstance(op, Matrices):
        raise TypeError(f"{op!r}: heads can be taken out of matrices alone.")
    return op[heads] if isinstance(op, Tensor) else op.take(heads)


def there_and_back(op: Linear, u: Float[Tensor, "*b n p"]) -> tuple[Float[Tensor, "*b m p"], Float[Tensor, "*b n p"]]:
    """Aᵀ u and A Aᵀ u."""
    if isinstance(op, Trimmed):
        return op.there_and_back(u)
    w = op.mT @ u
    return w, op @ w


def check_linear(op: Linear, seed: int = 0) -> None:
    """Raise unless A (x + 2y) = A x + 2 A y and ⟨A x, u⟩ = ⟨x, Aᵀ u⟩ for random vectors, but for rounding.

    >>> check_linear(torch.randn(5, 3))
    """
    generator = torch.Generator(op.device).manual_seed(seed)
    *_, n, m = op.shape
    x, y, u = (torch.randn(size, 1, dtype=op.dtype, device=op.device, generator=generator) for size in (m, m, n))
    ax, ay, both, au = op @ x, op @ y, op @ (x + 2 * y), op.mT @ u
    allowed = 64 * torch.finfo(op.dtype).eps
    size = ax.norm(dim=-2) + 2 * ay.norm(dim=-2)
    if ((both - ax - 2 * ay).norm(dim=-2) > allowed * size).any():
        raise ValueError(
            "op: A (x + 2y) is not A x + 2 A y; expected a map that is linear in the values. Likely cause: the "
            "weights depend on v, or there is randomness (dropout) in the forward pass."
        )
    left, right = (ax * u).sum(-2), (x * au).sum(-2)
    scale = ax.norm(dim=-2) * u.norm() + x.norm() * au.norm(dim=-2)
    if ((left - right).abs() > allowed * scale).any():
        raise ValueError(
            "op: ⟨A x, u⟩ is not ⟨x, Aᵀ u⟩; expected `.mT` to be the adjoint of `@`. Likely cause: an adjoint written "
            "by hand for another mask or normaliser."
        )
