"""Random projections into heads that are never trained, and low-rank updates of any projection.

learned      nn.Linear: y = W x, W trained
Gaussian     W_ci ~ N(0, 1/D), independent: a control with the scale of the others but without structure
Orthogonal   the rows of each head's block are orthonormal and uniform (Haar): QR of a Gaussian, signs corrected; or,
             with per_head=False, all rows of all heads are orthonormal to each other
Hadamard     the same from three rounds of signs, H and, if D is not a power of two, a permutation: O(D log D); only
             signs and permutations are stored
LoRA         W x + (α/r) B A x,  A (r × D),  B zero at the start (Hu et al. 2021, arXiv:2106.09685)

Scale. D is the width of a token x. A row w of unit length gives Var(w·x) = Var(x) for x with independent entries, so
q and k have the scale of x. The scores x_iᵀ W_qᵀ W_k x_j of two such tokens have variance Var(x)² ‖W_qᵀ W_k‖²_F. With
orthonormal rows this is exactly Var(x)² d for a head of width d, for every pair W_q and W_k; after the mechanism's 1/√d
it is Var(x)². A Gaussian W has this variance on average. So there is no factor √(D/d): it would preserve the length |x|
instead of the size of its entries (Johnson–Lindenstrauss) and multiply the scores by D/d. nn.Linear starts at
Var(W) = 1/(3D), where scores are a third as large; gain=3**-0.5 gives the same start.

Cost of freezing. With W_q and W_k fixed, the scores of given tokens have no parameters. The layer can learn what to
attend to only through earlier layers, in x, or through LoRA. W_q = W_k would make the scores symmetric and positive
semidefinite, so queries and keys need different seeds, as `Attention(…, qk=…)` gives them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from heedful.kernels.dispatch import as_given
from heedful.random_features.projections import orthonormal_columns, walsh_hadamard, walsh_hadamard_flops
from heedful.shapes import Float, Tensor

ROUNDS = 3
"""Rounds of signs and H, as in Yu et al. 2016 (arXiv:1610.09072); after one round, all entries have the same size."""


class FrozenProjection(nn.Module, ABC):
    """Base class of random linear maps from in_features to heads · head_dim, stored in buffers: saved, never trained.

    The map depends on the seed alone. It is drawn in float64 on the CPU and then rounded, so that a seed gives the same
    map on every device and in every precision.

    >>> import torch, heedful as h
    >>> project = h.nn.Orthogonal(64, heads=4, head_dim=8, seed=0)
    >>> isinstance(project, h.nn.FrozenProjection), project.dense().shape, list(project.parameters())
    (True, torch.Size([32, 64]), [])
    """

    def __init__(self, in_features: int, heads: int, head_dim: int, seed: int, gain: float):
        super().__init__()
        for name, value in (("in_features", in_features), ("heads", heads), ("head_dim", head_dim)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an integer ≥ 1, got {value!r}.")
        self.in_features, self.out_features = in_features, heads * head_dim
        self.heads, self.head_dim = heads, head_dim
        self.seed, self.gain = seed, gain

    @abstractmethod
    def forward(self, x: Float[Tensor, "*b n"]) -> Float[Tensor, "*b m"]:
        """W x."""

    @abstractmethod
    def dense(self) -> Float[Tensor, "m n"]:
        """W itself, one row for each output."""

    @abstractmethod
    def redraw(self, seed: int) -> None:
        """Draw a new map from the same distribution, in place."""

    def extra_repr(self) -> str:
        gain = "" if self.gain == 1 else f", gain={self.gain:.4g}"
        return f"{self.in_features}, heads={self.heads}, head_dim={self.head_dim}{gain}, frozen"


class _Dense(FrozenProjection):
    """A projection that stores W."""

    weight: Tensor

    def __init__(self, in_features, heads, head_dim, seed, gain, device, dtype):
        super().__init__(in_features, heads, head_dim, seed, gain)
        self.register_buffer("weight", torch.empty(self.out_features, in_features, device=device, dtype=dtype))

    def forward(self, x):
        _check_width(x, self)
        return F.linear(x, self.weight)

    def dense(self):
        return self.weight

    def redraw(self, seed):
        self.seed = seed
        self.weight.copy_(self.gain * self._draw(_generator(seed)))

    @abstractmethod
    def _draw(self, generator: torch.Generator) -> Tensor:
        """W with a gain of 1, in float64."""


class Gaussian(_Dense):
    """Frozen projection with entries N(0, 1/in_features): the control for `Orthogonal`.

    >>> project = Gaussian(64, heads=8, head_dim=8, seed=0)
    >>> project(torch.randn(2, 10, 64)).shape, list(project.parameters())
    (torch.Size([2, 10, 64]), [])

    gain   factor of W; the scale section at the top of this file explains gain=1
    """

    def __init__(
        self,
        in_features: int,
        heads: int,
        head_dim: int,
        seed: int = 0,
        *,
        gain: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, heads, head_dim, seed, gain, device, dtype)
        self.redraw(seed)

    def _draw(self, generator):
        return _normal(self.out_features, self.in_features, generator=generator) * self.in_features**-0.5


class Orthogonal(_Dense):
    """Frozen projection with uniformly drawn orthonormal rows, per head or over all heads.

    >>> project = Orthogonal(64, heads=8, head_dim=8, seed=0, dtype=torch.float64)
    >>> W = project.dense().unflatten(0, (8, 8))[3]
    >>> torch.allclose(W @ W.mT, torch.eye(8).double()), list(project.parameters())
    (True, [])

    per_head   True: heads are drawn independently, so their subspaces may overlap; needs head_dim ≤ in_features.
               False: one orthogonal map is split into heads with orthogonal subspaces; needs heads · head_dim ≤
               in_features
    gain       factor of W; the scale section at the top of this file explains gain=1
    """

    def __init__(
        self,
        in_features: int,
        heads: int,
        head_dim: int,
        seed: int = 0,
        *,
        per_head: bool = True,
        gain: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, heads, head_dim, seed, gain, device, dtype)
        _check_room(in_features, heads, head_dim, per_head)
        self.per_head = per_head
        self.redraw(seed)

    def _draw(self, generator):
        blocks, rows = (self.heads, self.head_dim) if self.per_head else (1, self.out_features)
        Q = orthonormal_columns(_normal(blocks, self.in_features, rows, generator=generator))
        return Q.mT.flatten(0, 1)


class Hadamard(FrozenProjection):
    """Frozen projection with orthonormal rows in O(D log D), without a stored matrix; D = in_features.

    >>> project = Hadamard(96, heads=6, head_dim=16, seed=0, dtype=torch.float64)
    >>> W = project.dense()
    >>> torch.allclose(W @ W.mT, torch.eye(96).double()), sum(x.numel() for x in project.buffers())
    (True, 576)

    One round multiplies by random signs and by the orthogonal Walsh–Hadamard matrix H. If D is not a power of two, it
    is split into powers of two, such as 96 = 64 + 32. Each part of a token has an H of its width, and a random
    permutation before each round mixes the parts. So the map is orthogonal for every width, without padding.

    Each map has D outputs, which are split into heads; more heads use further maps. Heads of the same map are
    orthogonal to each other. The rows are not uniform directions but signed patterns that approach them as D grows. On
    a CPU it is faster than a dense matrix from a width of about 1,000 (benchmarks/projections.py).

    per_head   True: a separate map per head, at `heads` times the work
    gain       factor of W; the scale section at the top of this file explains gain=1
    """

    signs: Tensor
    order: Tensor | None

    def __init__(
        self,
        in_features: int,
        heads: int,
        head_dim: int,
        seed: int = 0,
        *,
        per_head: bool = False,
        gain: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, heads, head_dim, seed, gain)
        _check_room(in_features, heads, head_dim, per_head=True)
        self._matrix: Tensor | None = None
        self.heads_of_a_map = 1 if per_head else min(heads, in_features // head_dim)
        self.widths = [1 << bit for bit in reversed(range(in_features.bit_length())) if in_features >> bit & 1]
        shape = ROUNDS, -(-heads // self.heads_of_a_map), in_features
        self.register_buffer("signs", torch.empty(shape, device=device, dtype=dtype))
        several = len(self.widths) > 1
        self.register_buffer("order", torch.empty(shape, device=device, dtype=torch.long) if several else None)
        self.redraw(seed)

    def forward(self, x):
        _check_width(x, self)
        if self._matrix is not None and self._matrix.dtype == x.dtype:
            return F.linear(x, self._matrix)
        wide = torch.promote_types(x.dtype, torch.float32)
        with as_given(x):
            rows = self._rotate(x.to(wide)) * self.gain
        rows = rows[..., : self.heads_of_a_map * self.head_dim].flatten(-2)
        return rows[..., : self.out_features].to(_linear_dtype(x))

    def _rotate(self, x: Float[Tensor, "*b n"]) -> Float[Tensor, "*b maps n"]:
        """Return the D outputs of every map."""
        x = x[..., None, :].expand(*x.shape[:-1], *self.signs.shape[-2:])
        for turn, signs in enumerate(self.signs.to(x.dtype)):
            if self.order is not None:
                x = x.gather(-1, self.order[turn].expand_as(x))
            parts = (x * signs).split(self.widths, -1)
            x = torch.cat([walsh_hadamard(part) * part.shape[-1] ** -0.5 for part in parts], -1)
        return x

    def materialise(self, dtype: torch.dtype | None = None) -> None:
        """Store W and use it for tokens of this dtype: faster at small widths, in particular on a GPU.

        W is not saved in the state_dict; `redraw` and a move to another device drop it.
        """
        self._matrix = self.dense().to(dtype or self.signs.dtype).contiguous()

    def _apply(self, fn, recurse=True):
        self._matrix = None
        return super()._apply(fn, recurse)

    def dense(self):
        if self._matrix is not None and self._matrix.dtype == self.signs.dtype:
            return self._matrix
        return self(torch.eye(self.in_features, dtype=self.signs.dtype, device=self.signs.device)).mT

    def redraw(self, seed):
        self.seed, self._matrix = seed, None
        generator = _generator(seed)
        shape = self.signs.shape
        self.signs.copy_(torch.where(_normal(*shape, generator=generator) < 0, -1.0, 1.0))
        if self.order is not None:
            self.order.copy_(_normal(*shape, generator=generator).argsort(-1))


class LoRA(nn.Module):
    """Any projection plus a trained low-rank update (α/r) B A, which starts at zero.

    >>> adapted = LoRA(Orthogonal(64, heads=8, head_dim=8, seed=0), rank=4)
    >>> [(name, tuple(p.shape)) for name, p in adapted.named_parameters()]
    [('A', (4, 64)), ('B', (64, 4))]
    >>> layer = adapted.merge()
    >>> type(layer).__name__, layer.weight.requires_grad
    ('Linear', False)

    base    a frozen projection, an nn.Linear, another LoRA, or any module with the widths below. LoRA does not freeze
            it: to freeze a learned one, call base.requires_grad_(False)
    rank    r
    alpha   α; r by default, which makes the factor 1
    in_features, out_features   widths of the base, if it is another kind of module
    """

    in_features: int
    out_features: int

    def __init__(
        self,
        base: nn.Module,
        rank: int,
        alpha: float | None = None,
        *,
        in_features: int | None = None,
        out_features: int | None = None,
    ):
        super().__init__()
        if not isinstance(base, nn.Module):
            raise TypeError(f"base: expected a module such as nn.Linear or Orthogonal, got {type(base).__name__}.")
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank: expected an integer ≥ 1, got {rank!r}.")
        if isinstance(base, nn.Linear | FrozenProjection | LoRA):
            in_features, out_features = base.in_features, base.out_features
        elif in_features is None or out_features is None:
            raise TypeError(
                f"base: {type(base).__name__}, whose widths are not known; expected in_features and out_features too."
            )
        self.base, self.rank = base, rank
        self.alpha = float(rank if alpha is None else alpha)
        self.in_features, self.out_features = in_features, out_features
        like = next((x for x in chain(base.parameters(), base.buffers()) if x.is_floating_point()), torch.empty(0))
        self.A = nn.Parameter(torch.empty(rank, in_features, device=like.device, dtype=like.dtype))
        self.B = nn.Parameter(torch.empty(out_features, rank, device=like.device, dtype=like.dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set B = 0 and draw A at a scale where A x has the scale of x."""
        nn.init.normal_(self.A, std=self.in_features**-0.5)
        nn.init.zeros_(self.B)

    def forward(self, x: Float[Tensor, "*b n"]) -> Float[Tensor, "*b m"]:
        return self.base(x) + F.linear(F.linear(x, self.A), self.B) * (self.alpha / self.rank)

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        """Return one nn.Linear that computes the same. It is trainable if the base's weight is.

        This LoRA is unchanged: to undo a merge, assign it again.
        """
        base = self.base.merge() if isinstance(self.base, LoRA) else self.base
        if not isinstance(base, nn.Linear | _Dense):
            raise TypeError(
                f"base: {type(base).__name__} stores no weight to add to, expected nn.Linear, Orthogonal or Gaussian. "
                "Likely cause: a Hadamard projection, whose point is to have no matrix."
            )
        weight, bias = base.weight, base.bias if isinstance(base, nn.Linear) else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        with as_given(weight):
            update = self.B.to(wide) @ self.A.to(wide) * (self.alpha / self.rank)
        like = {"device": weight.device, "dtype": weight.dtype}
        merged = nn.utils.skip_init(nn.Linear, self.in_features, self.out_features, bias=bias is not None, **like)
        assert isinstance(merged, nn.Linear)
        merged.weight.copy_(weight.to(wide) + update)
        if bias is not None:
            merged.bias.copy_(bias)
            merged.bias.requires_grad_(bias.requires_grad)
        merged.weight.requires_grad_(weight.requires_grad)
        return merged

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha:g}"


def token_flops(projection: nn.Module | None) -> int:
    """Return the flops of projecting one token: two per weight of its matrices, or those of Hadamard transforms."""
    flops = 0
    for module in () if projection is None else projection.modules():
        if isinstance(module, Hadamard):
            rounds, maps, _ = module.signs.shape
            flops += rounds * maps * sum(map(walsh_hadamard_flops, module.widths))
        else:
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            flops += 2 * sum(x.numel() for x in own if x.ndim == 2)
    return flops


def seeds(seed: int | None, count: int) -> list[int]:
    """Return `count` seeds derived from `seed`; if it is None, from torch's generator, like learned weights."""
    if seed is None:
        return torch.randint(2**62, (count,), device="cpu").tolist()
    return torch.randint(2**62, (count,), generator=_generator(seed), device="cpu").tolist()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


def _linear_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that nn.Linear would return (autocast): all projections of a layer must agree."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _check_room(in_features: int, heads: int, head_dim: int, per_head: bool) -> None:
    if per_head and head_dim > in_features:
        raise ValueError(
            f"head_dim: {head_dim} orthonormal rows of width in_features = {in_features}, expected at most as many as "
            "the width. `Gaussian` has no such limit."
        )
    if not per_head and heads * head_dim > in_features:
        raise ValueError(
            f"per_head: False asks for heads · head_dim = {heads} · {head_dim} = {heads * head_dim} orthonormal rows "
            f"of width in_features = {in_features}, expected at most as many as the width. per_head=True needs "
            "head_dim ≤ in_features alone."
        )


def _check_width(x: Tensor, projection: FrozenProjection) -> None:
    if x.ndim < 1 or x.shape[-1] != projection.in_features:
        raise ValueError(
            f"x: shape {tuple(x.shape)}, expected (*batch, {projection.in_features}) for {projection!r}. Likely cause: "
            "a projection built for another width."
        )
