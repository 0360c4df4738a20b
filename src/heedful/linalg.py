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
rest        the same Lanczos runs are quadrature rules for the eigenvalues of R Rᵀ (Ubaru, Chen and Saad 2017)

Floor and ceiling hold for whatever U came out: they need it to be orthonormal, not to have converged. All of it is
about A Aᵀ, so pass A with its shorter side first.

Arrays stay where A is; Ritz values and the bounds made from them are float64 on the CPU, since a GPU would spend its
time on launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import acosh, cosh, log, pi, sqrt
from typing import NamedTuple, Protocol

import torch

from heedful.shapes import Float, Int, Tensor

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
    total = torch.zeros(*x.shape[:-1], y.shape[-2], dtype=torch.float64, device=x.device)
    step = CHUNK.get(x.device.type, 1 << 12)
    for start in range(0, x.shape[-1], step):
        part = slice(start, start + step)
        total += x[..., part].double() @ y[..., part].double().mT
    return total


def orthonormal(x: Float[Tensor, "*b n p"], basis: Float[Tensor, "*b k n"], generator: torch.Generator) -> Tensor:
    """An orthonormal basis of x without its part in `basis`; directions that x lacks are filled at random.

    Projecting twice is enough, but for directions that are all rounding: those are drawn anew.
    """
    size = x.norm(dim=(-2, -1), keepdim=True)
    x = x - basis.mT @ (basis @ x)
    q = None if x.device.type == "cpu" else _by_cholesky(x)
    if q is None:
        q, r = torch.linalg.qr(x)
        lost = r.diagonal(dim1=-2, dim2=-1).abs()[..., None, :] <= 8 * torch.finfo(x.dtype).eps * size
        if lost.any():
            fresh = torch.randn(x.shape[-2:], dtype=x.dtype, device=x.device, generator=generator)
            q = torch.where(lost, fresh / sqrt(x.shape[-2]), q)
            q = torch.linalg.qr(q - basis.mT @ (basis @ q))[0]
    q = q - basis.mT @ (basis @ q)
    again = None if x.device.type == "cpu" else _by_cholesky(q)
    return torch.linalg.qr(q)[0] if again is None else again


def _by_cholesky(x: Float[Tensor, "*b n p"]) -> Tensor | None:
    """x R⁻¹ with RᵀR = xᵀx: products instead of Householder's many small steps, which a GPU is slow at.

    Orthonormal up to ε times the condition of x, so that a second time it is so up to ε. None where the condition, or
    a column that is all rounding, forbids it.
    """
    inner = gram(x.mT, x.mT)
    scales = inner.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(torch.float64).tiny).rsqrt()
    factor, failed = torch.linalg.cholesky_ex(inner * scales[..., None] * scales[..., None, :], upper=True)
    lengths = factor.diagonal(dim1=-2, dim2=-1)
    if not bool(((failed == 0) & (lengths > 1e-3).all(-1) & (scales < 1e20).all(-1)).all()):
        return None
    identity = torch.eye(x.shape[-1], dtype=torch.float64, device=x.device).expand_as(factor)
    inverse = scales[..., None] * torch.linalg.solve_triangular(factor, identity, upper=True)
    return x @ inverse.to(x.dtype)


class Ritz(NamedTuple):
    """θ_i², each at most σ_i²; the norms of their residuals; and the rank that all residuals together have at most."""

    squares: Float[Tensor, "*b k"]
    leaks: Float[Tensor, "*b k"]
    block: int


class Sketch:
    """A growing orthonormal basis U of the range of A, with W = Aᵀ U; `grow` adds a block of columns.

    >>> A = torch.diag(torch.tensor([5.0, 4.0, 3.0, 1e-3, 0, 0, 0, 0]))
    >>> sketch = Sketch(A, block=2, most=4)
    >>> sketch.grow(), sketch.grow()
    (None, None)
    >>> [round(float(square), 3) for square in sketch.solve().squares[:3]]
    [25.0, 16.0, 9.0]
    """

    def __init__(self, op: Linear, block: int, most: int, seed: int = 0):
        *batch, n, m = op.shape
        self.op, self.block, self.most = op, block, min(most, n)
        self.generator = torch.Generator(op.device).manual_seed(seed)
        # Kept with the columns as rows: each one contiguous, and pages not yet grown into cost nothing.
        self._basis = torch.empty(*batch, self.most, n, dtype=op.dtype, device=op.device)
        self._image = torch.empty(*batch, self.most, m, dtype=op.dtype, device=op.device)
        self.width = 0
        self.gram = torch.zeros(*batch, 0, 0, dtype=torch.float64, device=op.device)
        self._defect = torch.zeros(batch, dtype=torch.float64, device=op.device)
        start = torch.randn(m, min(block, self.most), dtype=op.dtype, device=op.device, generator=self.generator)
        self._next = (op @ start).expand(*batch, n, -1)
        self.products = self._next.shape[-1]

    @property
    def basis(self) -> Float[Tensor, "*b k n"]:
        """The columns of U, as rows."""
        return self._basis[..., : self.width, :]

    @property
    def image(self) -> Float[Tensor, "*b k m"]:
        """The columns of W = Aᵀ U, as rows."""
        return self._image[..., : self.width, :]

    @property
    def full(self) -> bool:
        return self.width == self.most

    def grow(self) -> None:
        """One block more: as many products with Aᵀ and with A as it has columns."""
        p = min(self.block, self.most - self.width)
        old, new = slice(0, self.width), slice(self.width, self.width + p)
        u = orthonormal(self._next[..., :p], self.basis, self.generator)
        w = self.op.mT @ u
        self._basis[..., new, :] = u.mT
        self._image[..., new, :] = w.mT
        self.width += p
        self._extend_gram(old, new)
        # What the next block is made from is also what couples this one to the rest: (1 − U Uᵀ) A W_t.
        z = self.op @ w
        self._next = z - self.basis.mT @ (self.basis @ z)
        self.products += 2 * p

    def _extend_gram(self, old: slice, new: slice) -> None:
        image = gram(self.image, self._image[..., new, :])
        self.gram = torch.cat([torch.cat([self.gram, image[..., old, :]], -1), image.mT], -2)
        inner = gram(self.basis, self._basis[..., new, :])
        inner[..., new, :] -= torch.eye(new.stop - new.start, dtype=torch.float64, device=inner.device)
        # Frobenius norm of UᵀU − 1: the new columns count twice, as columns and as rows.
        self._defect = self._defect + 2 * inner.square().sum((-2, -1))

    @property
    def captured(self) -> Float[Tensor, "*b"]:
        """Σ θ_i² = ‖W‖²."""
        return self.gram.diagonal(dim1=-2, dim2=-1).sum(-1).cpu()

    @property
    def defect(self) -> Float[Tensor, "*b"]:
        """‖UᵀU − 1‖: how far U is from orthonormal."""
        return self._defect.sqrt().cpu()

    def solve(self) -> Ritz:
        """The Ritz values, squared, and the norm of each one's residual (A Aᵀ − θ²) u."""
        squares, vectors = torch.linalg.eigh(self.gram)
        p = self._next.shape[-1]
        # Only the last block has a residual: those before it are in the span of the blocks that they made.
        left = gram(self._next.mT, self._next.mT)
        last = vectors[..., -p:, :]
        leaks = (last * (left @ last)).sum(-2).clamp(min=0).sqrt()
        self._vectors = vectors.flip(-1)
        squares, leaks = torch.stack([squares.flip(-1).clamp(min=0), leaks.flip(-1)]).cpu()
        return Ritz(squares, leaks, p)

    def first(self, count: Int[Tensor, "*b"]) -> Float[Tensor, "*b k n"]:
        """The first `count` Ritz vectors of what was last solved, as rows; zeros where other heads have more."""
        chosen = (torch.arange(self.width) < count[..., None]).to(self._vectors.device)
        rotation = (self._vectors * chosen[..., None, :])[..., : max(1, int(count.max()))]
        return rotation.mT.to(self.basis.dtype) @ self.basis


class Rest(NamedTuple):
    """The eigenvalues of R Rᵀ = (1 − U Uᵀ) A Aᵀ (1 − U Uᵀ), as far as random starts tell."""

    nodes: Float[Tensor, "*b p k"]  # eigenvalues of p quadrature rules of k nodes
    weights: Float[Tensor, "*b p k"]  # the share of all eigenvalues near each node
    largest: Float[Tensor, "*b"]  # no more than the largest eigenvalue
    steps: int
    width: Int[Tensor, "*b"]  # columns that had been taken out


class Probes:
    """Stochastic Lanczos quadrature of A Aᵀ with the span of `basis`, of `width` rows that are not 0, taken out.

    Each probe is Lanczos with full reorthogonalisation from its own random start; the probes go through the operator
    side by side. `advance` takes steps, and more steps go on where the last ones ended.
    """

    def __init__(self, op: Linear, basis: Float[Tensor, "*b k n"], width: Tensor, count: int, seed: int = 1):
        *batch, n, _ = op.shape
        generator = torch.Generator(op.device).manual_seed(seed)
        x = torch.randn(*batch, n, count, dtype=op.dtype, device=op.device, generator=generator)
        for _ in range(2):
            x = x - basis.mT @ (basis @ x)
        self.op, self.basis, self.width, self.count = op, basis, width, count
        self.path = [x / x.norm(dim=-2, keepdim=True).clamp(min=1e-30)]
        self.diagonal: list[Tensor] = []
        self.beside: list[Tensor] = []
        self.products = 0

    def advance(self, steps: int) -> Rest:
        """Up to so many steps in all."""
        while len(self.diagonal) < max(1, min(steps, self.op.shape[-2] - self.basis.shape[-2])):
            if self.diagonal:
                self._turn()
            self._image = self.op.mT @ self.path[-1]
            self.diagonal.append(self._image.double().square().sum(-2))
            self.products += self.count
        return self._rules()

    def _turn(self) -> None:
        """The next direction: A Aᵀ x without what the path and the basis have of it."""
        y = self.op @ self._image
        self.products += self.count
        for _ in range(2):
            y = y - self.basis.mT @ (self.basis @ y)
            y = _without(self.path, y)
        length = y.double().norm(dim=-2)
        # Where the start's own space is used up, what is left is rounding: its rule is complete, and stays as it is.
        size = torch.stack(self.diagonal).amax(0).clamp(min=1e-30)
        over = length <= 64 * torch.finfo(y.dtype).eps * size
        self.beside.append(torch.where(over, 0, length))
        self.path.append(torch.where(over[..., None, :], 0, y / length.clamp(min=1e-30).to(y.dtype)[..., None, :]))

    def _rules(self) -> Rest:
        diagonal = torch.stack(self.diagonal, -1).cpu()
        tridiagonal = torch.diag_embed(diagonal)
        if self.beside:
            edge = torch.stack(self.beside, -1).cpu()
            tridiagonal = tridiagonal + torch.diag_embed(edge, 1) + torch.diag_embed(edge, -1)
        nodes, vectors = torch.linalg.eigh(tridiagonal)
        shares = vectors[..., 0, :].square()
        return Rest(nodes.clamp(min=0), shares, nodes.amax((-2, -1)), diagonal.shape[-1], self.width)


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


def ceiling(ritz: Ritz, residual: Float[Tensor, "*b"], norm: Float[Tensor, "*b"], n: int) -> Float[Tensor, "*b n"]:
    """Upper bounds of Σ_{i≤r} σ_i² for r = 1 … n, from the Ritz values, ‖R‖² and ν ≥ ‖R‖₂².

    >>> exact = Ritz(torch.tensor([4.0, 1.0]), torch.zeros(2), 2)
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
    for count, level, coupling in _splits(ritz, norm):
        before = torch.minimum(ranks, count)
        bound = sums.gather(-1, before) + (ranks - before) * level + sqrt(ritz.block) * coupling
        best = torch.minimum(best, bound)
        gained = coupling.square() / (ritz.squares - level).clamp(min=0)  # infinite, or 0 / 0, where θ² ≤ s
        best[..., :k] = torch.fmin(best[..., :k], sums[..., 1:] + gained)
    return best


def ceilings(ritz: Ritz, norm: Float[Tensor, "*b"]) -> Float[Tensor, "*b k"]:
    """Upper bounds of each σ_i² by the same splits: no eigenvalue moves by more than the coupling's norm.

    >>> ceilings(Ritz(torch.tensor([4.0, 1.0]), torch.zeros(2), 2), torch.tensor(2.0)).tolist()
    [4.0, 2.0]
    """
    norm = norm[..., None]
    best = ritz.squares + norm
    for _, level, coupling in _splits(ritz, norm):
        best = torch.minimum(best, torch.maximum(ritz.squares, level) + coupling)
        best = torch.fmin(best, ritz.squares + coupling.square() / (ritz.squares - level).clamp(min=0))
    return best


SPLITS = 8  # places at which the Ritz values are cut in two, and the best of the bounds taken


def _splits(ritz: Ritz, norm: Float[Tensor, "*b 1"]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For a few a: how many of the first a Ritz values stand above s, s itself, and the Frobenius norm of C_a."""
    k = ritz.squares.shape[-1]
    below = torch.nn.functional.pad(ritz.squares, (0, 1))
    leaked = torch.nn.functional.pad(ritz.leaks.square().cumsum(-1), (1, 0))
    for a in sorted({-(-k * part // SPLITS) for part in range(1, SPLITS + 1)}):
        inside, outside = leaked[..., a : a + 1], leaked[..., -1:] - leaked[..., a : a + 1]
        level = torch.maximum(below[..., a : a + 1], norm) + outside.clamp(min=0).sqrt()
        yield (ritz.squares[..., :a] >= level).sum(-1, keepdim=True), level, inside.sqrt()


def filled(
    squares: Float[Tensor, "*b k"], count: Int[Tensor, "*b"], energy: Float[Tensor, "*b"], rest: Rest, n: int
) -> Float[Tensor, "*b n"]:
    """All n squared values as estimated: the first `count` θ_i², and the quantiles of R Rᵀ.

    The nodes of all probes, with their shares, make one distribution; its quantile function runs straight between
    the middles of the shares. Columns that the sketch gained since the probes were sent took the largest of them.
    What is certain, the sum, is restored at the end.
    """
    # A node without weight says nothing; its rule's mean keeps it from bending the line.
    means = (rest.nodes * rest.weights).sum(-1, keepdim=True)
    nodes = torch.where(rest.weights > 1e-10, rest.nodes, means).flatten(-2)
    order = nodes.argsort(-1, descending=True)
    nodes = nodes.gather(-1, order)
    shares = rest.weights.flatten(-2).gather(-1, order)
    middles = ((shares.cumsum(-1) - shares / 2) / shares.sum(-1, keepdim=True)).contiguous()
    places = torch.arange(n, device=nodes.device)
    at = (places - rest.width[..., None] + 0.5) / (n - rest.width[..., None]).clamp(min=1)
    tail = _between(middles, nodes, at.double().contiguous())
    known = torch.nn.functional.pad(squares, (0, n - squares.shape[-1]))
    is_known = places < count[..., None]
    tail = torch.where(is_known, 0, tail)
    left = (energy - torch.where(is_known, known, 0).sum(-1)).clamp(min=0)
    tail = tail * (left / tail.sum(-1).clamp(min=1e-300))[..., None]
    return torch.where(is_known, known, tail).sort(-1, descending=True).values


def _between(x: Float[Tensor, "*b k"], y: Float[Tensor, "*b k"], at: Float[Tensor, "*b l"]) -> Float[Tensor, "*b l"]:
    """The broken line through (x, y), x increasing, at some places; level beyond its ends."""
    if x.shape[-1] == 1:
        return y.expand_as(at)
    right = torch.searchsorted(x, at).clamp(1, x.shape[-1] - 1)
    x0, x1, y0, y1 = (values.gather(-1, index) for values in (x, y) for index in (right - 1, right))
    return y0 + ((at - x0) / (x1 - x0).clamp(min=1e-30)).clamp(0, 1) * (y1 - y0)


class Trimmed:
    """A matrix as slabs of rows, each without the columns of zeros before and after: half the work where it is causal.

    >>> A = torch.ones(600, 600).tril()
    >>> x = torch.ones(600, 1)
    >>> bool((Trimmed(A) @ x == A @ x).all()), bool((Trimmed(A).mT @ x == A.mT @ x).all())
    (True, True)
    """

    ROWS = 128

    def __init__(self, dense: Float[Tensor, "n m"]):
        self.shape, self.dtype, self.device = tuple(dense.shape), dense.dtype, dense.device
        self.slabs = [
            _trim(dense, start, min(start + self.ROWS, len(dense))) for start in range(0, len(dense), self.ROWS)
        ]

    def __matmul__(self, x: Float[Tensor, "m p"]) -> Float[Tensor, "n p"]:
        return torch.cat([slab @ x[cols] for _, cols, slab in self.slabs])

    @property
    def mT(self) -> Linear:
        return _TrimmedAdjoint(self)


class _TrimmedAdjoint:
    def __init__(self, of: Trimmed):
        self.shape, self.dtype, self.device, self.mT = of.shape[::-1], of.dtype, of.device, of

    def __matmul__(self, y: Float[Tensor, "n p"]) -> Float[Tensor, "m p"]:
        out = y.new_zeros(self.shape[0], y.shape[1])
        for rows, cols, slab in self.mT.slabs:
            out[cols].addmm_(slab.mT, y[rows])
        return out


def _trim(dense: Tensor, start: int, stop: int) -> tuple[slice, slice, Tensor]:
    slab = dense[start:stop]
    used = slab.abs().sum(0).nonzero()  # any(0) takes three times as long
    cols = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)
    return slice(start, stop), cols, slab[:, cols].contiguous()


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
