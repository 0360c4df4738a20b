"""Rotary positions (Su et al. 2021, arXiv:2104.09864).

    angle       θ_pt = (p / scaling) · base^(-2t / r),  t = 0 … r/2 − 1
    rotation    (x, y) ↦ (x cos θ − y sin θ, x sin θ + y cos θ)  for each pair t of the first r numbers
    pairs       half-split (t, t + r/2), as in GPT-NeoX and Llama; interleaved (2t, 2t + 1), as in the paper and GPT-J

So q_i·k_j after the rotation depends on i − j alone.
"""

from __future__ import annotations

import torch
from torch import nn

from heedful import segments as _segments
from heedful.shapes import Float, Int, Tensor


class Rope(nn.Module):
    """Rotary positions: rotates each pair of numbers of a token by an angle proportional to its position.

    >>> import torch
    >>> rope, x = Rope(8), torch.randn(2, 4, 10, 8)
    >>> whole = rope(x)
    >>> torch.allclose(rope(x[..., 6:, :], offset=6), whole[..., 6:, :])
    True

    d             width of the input
    base          the slowest pair makes one turn in about 2π · base positions
    width         rotate only the first `width` numbers (GPT-J, GPT-NeoX); all by default
    interleaved   True: pairs are (2t, 2t + 1); False: (t, t + r/2). Weights trained for one layout are wrong in the
                  other
    scaling       divisor of the positions (linear interpolation, Chen et al. 2023, arXiv:2306.15595)

    There are no parameters, buffers or tables. Each call computes the angles, once for all heads, which costs little
    compared with the projections. So there is no maximum length, the state_dict is empty, and casting a model to
    bfloat16 rounds no angles.
    """

    def __init__(
        self,
        d: int,
        base: float = 10000.0,
        *,
        width: int | None = None,
        interleaved: bool = False,
        scaling: float = 1.0,
    ):
        super().__init__()
        width = d if width is None else width
        if width % 2 or not 0 <= width <= d:
            raise ValueError(f"width: expected an even number in 0…{d} (d), got {width}. Numbers turn in pairs.")
        if not base > 0:
            raise ValueError(f"base: expected > 0, got {base}.")
        if not scaling > 0:
            raise ValueError(f"scaling: expected > 0, got {scaling}. To go 4 times as far as in training, give 4.")
        self.d, self.base, self.width, self.interleaved, self.scaling = d, base, width, interleaved, scaling

    def forward(
        self,
        x: Float[Tensor, "*b n d"],
        positions: Int[Tensor, "*s n"] | None = None,
        *,
        offset: int = 0,
        segments: Int[Tensor, "*s n"] | None = None,
    ) -> Float[Tensor, "*b n d"]:
        """Return x rotated by its positions, which broadcast against (*b, n).

        The positions are `positions` if given; otherwise they count from the start of each segment, or from 0 without
        segments. `offset` is added to them.
        """
        n = x.shape[-2] if x.ndim > 1 else -1
        if n < 0 or x.shape[-1] != self.d:
            raise ValueError(
                f"x: shape {tuple(x.shape)}, expected (*batch, n, {self.d}). Likely cause: heads were not split, or "
                f"Rope was built for another width."
            )
        if positions is not None and segments is not None:
            raise ValueError("positions: given together with segments, expected one of them: segments imply positions.")
        if segments is not None:
            positions = _segments.positions(segments)
        elif positions is None:
            positions = torch.arange(n, device=x.device)
        if positions.is_floating_point() or positions.ndim < 1 or positions.shape[-1] != n:
            raise ValueError(
                f"positions: {positions.dtype} of shape {tuple(positions.shape)}, expected integers (*batch, {n}), one "
                "for each token. Likely cause: positions of the cached tokens were given too."
            )
        return self._rotate(x, *self._turn(positions + offset))

    def _turn(self, positions: Int[Tensor, "*s n"]) -> tuple[Float[Tensor, "*s n r"], Float[Tensor, "*s n r"]]:
        """Cosine and sine of the angles, in float64.

        float32 is not precise enough: at position 10⁶ its numbers are 0.06 apart, so the fastest pair, whose angle is
        the position itself, would be off by 0.03 radians. In float64 the error there is 10⁻¹⁰.
        """
        index = torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device)
        frequencies = self.base ** (-index / max(self.width, 1)) / self.scaling
        angles = positions[..., None].double() * frequencies
        return angles.cos(), angles.sin()

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x rotated by the given angles, computed in float32 or better and rounded once."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = cos.to(dtype), sin.to(dtype)
        turned, rest = x[..., : self.width].to(dtype), x[..., self.width :]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
        else:
            a, b = turned.chunk(2, -1) if self.width else (turned, turned)
        pair = a * cos - b * sin, a * sin + b * cos
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat([turned.to(x.dtype), rest], -1)

    def extra_repr(self) -> str:
        parts = [f"{self.d}", f"base={self.base:g}"]
        parts += [f"width={self.width}"] if self.width != self.d else []
        parts += ["interleaved=True"] if self.interleaved else []
        parts += [f"scaling={self.scaling:g}"] if self.scaling != 1 else []
        return ", ".join(parts)
