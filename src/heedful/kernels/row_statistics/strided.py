"""Row statistics over keys a stride apart, by plain rows inside residue classes (kernels/softmax/strided).

keys      j = b·s + r is row b of class r; a query does not see a target of another class
bands     offsets least … most become the steps ⌈least / s⌉ … ⌊most / s⌋
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from heedful.kernels.blocked.tiles import RowFunction
from heedful.kernels.dispatch import Kernel
from heedful.kernels.row_statistics.sums import Band, Request, RowSums
from heedful.kernels.softmax.recognise import StridedKeys, about_classes, recognise
from heedful.kernels.softmax.strided.classes import Grid, on_grid
from heedful.patterns import Pattern
from heedful.segments import Segments
from heedful.shapes import Float, Int, Tensor


@torch.no_grad()
def row_statistics(
    within: Kernel,
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    rows: RowFunction,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
    request: Request,
) -> RowSums:
    """Sums over the rows of A; the same call as `reference.row_statistics`."""
    shape = recognise(pattern)
    assert isinstance(shape, StridedKeys), "objections() come first"
    grid, rows = Grid(q, k, min(shape.offsets.step, k.shape[-2])), on_grid(rows)
    inputs = grid.queries(q), grid.keys(k)
    inner = replace(
        request,
        targets=None if request.targets is None else _targets(request.targets, grid),
        bands=tuple(_steps(band, grid.step) for band in request.bands),
        columns=None if request.columns is None else grid.keys(request.columns),
        values=None if request.values is None else grid.keys(request.values),
        scratch=None,
    )
    if not grid.after or not shape.offsets.after:
        found = within(*inputs, rows, shape.inside, None, scale, inner)
        return _back(found, grid)
    whole = grid.step - grid.after  # the other classes lack the last row
    parts = []
    for residues, length in ((slice(whole), None), (slice(whole, None), -1)):
        at = ..., residues, slice(length), slice(None)
        targets, columns, values = (None if x is None else x[at] for x in (inner.targets, inner.columns, inner.values))
        asked = replace(inner, targets=targets, columns=columns, values=values)
        parts.append(within(*(x[at] for x in inputs), rows, shape.inside, None, scale, asked))
    return _back(_joined(parts), grid)


def objections(q, k, rows, pattern, segments, scale, request: Request) -> list[str]:
    """Why residue classes can't take these inputs."""
    why = about_classes(q, k, k, rows, pattern, segments, scale)
    if segments is not None:
        why.append("targets and bands are not moved into the residue classes of segments")
    if request.into is not None or request.down is not None:
        why.append("a caller that keeps the matrix wants it row by row, not class by class")
    if 0 in (*q.shape, *k.shape):
        why.append("it can't take an empty tensor")
    return why


def _targets(targets: Int[Tensor, "*#b n t"], grid: Grid) -> Int[Tensor, "*#b r a t"]:
    """The targets as rows of the grid; −1 for no target and for a target of another class."""
    wanted = grid.queries(targets.long() + 1) - 1  # the grid is filled with 0, which becomes −1: no target
    residue = torch.arange(grid.step, device=targets.device)[:, None, None]
    return torch.where((wanted >= 0) & (wanted % grid.step == residue), wanted // grid.step, -1)


def _steps(band: Band, step: int) -> Band:
    least, most = band
    return None if least is None else -(-least // step), None if most is None else most // step


def _joined(parts: list[RowSums]) -> RowSums:
    """Join the classes of full length with those that lack the last row; zeros fill that row and are never read."""
    longer, shorter = parts
    found: dict[str, Any] = {}
    for name, x in shorter.tensors().items():
        axes = longer.total.ndim
        filled = torch.cat([x, x.new_zeros(*x.shape[: axes - 1], 1, *x.shape[axes:])], axes - 1)
        found[name] = torch.cat([getattr(longer, name), filled], axes - 2)
    return replace(longer, **found)


def _back(found: RowSums, grid: Grid) -> RowSums:
    """Reorder (*batch, r, a, …) to (*batch, n, …)."""
    axis = found.total.ndim - 2
    residue = torch.arange(grid.step, device=found.total.device)[:, None]
    where = torch.where(found.where >= 0, found.where * grid.step + residue, -1)
    moved: dict[str, Any] = {
        name: x.transpose(axis, axis + 1).flatten(axis, axis + 1).narrow(axis, grid.before, grid.n)
        for name, x in replace(found, where=where).tensors().items()
    }
    return replace(found, **moved)
