"""Checks that the captured attention is what the model computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from heedful.hf.calls import Call
from heedful.hf.modules import CheckFailed
from heedful.hf.tap import Own
from heedful.hf.weights import listed
from heedful.shapes import Tensor


def compare_call(call: Call, own: Own, out: Tensor, *others: Tensor) -> None:
    """Compare weights and outputs of one call, and the outputs in `others`, with the module's own eager function."""
    where, call = f"{call.name} ({type(own.module).__name__})", call.softmaxes
    exact = call.to(torch.float64)
    expected, weights = own.exactly()
    real = call.real[:, None, :, None]
    scores = (call.q.float() @ call.per_head(call.k).float().mT).abs().max() * call.scale
    # Eager functions compute softmax in float32. A score z has rounding error eps·|z|, its weight this relative error.
    allowed = 8 * torch.finfo(torch.float32).eps * (1 + float(scores))
    matrix = exact.operator().to_dense()
    _demand(matrix, weights, real, allowed, f"{where}: weights")
    height = float(call.v.abs().max())
    oracle = matrix @ exact.per_head(exact.v)
    _demand(oracle, expected, real, allowed * height, f"{where}: outputs")
    # In the model's precision, allow twice the error of the model's own computation.
    error = _largest((out.transpose(1, 2).double() - oracle).abs(), real)
    eps = torch.finfo(call.q.dtype).eps
    for found in (call.forward(), *others):
        _demand(found, oracle, real, 2 * error + 4 * eps * height, f"{where}: outputs in {call.q.dtype}")


def _demand(found: Tensor, expected: Tensor, real: Tensor, allowed: float, what: str) -> None:
    if found.shape != expected.shape:
        raise CheckFailed(f"{what}: shape {tuple(found.shape)}, the model's own {tuple(expected.shape)}.")
    error = _largest((found.double() - expected.double()).abs(), real)
    if not error <= allowed:
        raise CheckFailed(
            f"{what} differ from the model's own by {error:.2g}, more than {allowed:.2g}. Likely cause: the module "
            "does something to its scores that the capture does not know. Nothing was measured."
        )


def _largest(difference: Tensor, real: Tensor) -> float:
    return float(torch.where(real, difference, 0).max())


def check_finite_model(outputs: list[Tensor], model: nn.Module) -> None:
    """Raise if the model's own outputs are NaN: then there is nothing to compare with."""
    name = type(model).__name__
    if any(bool(output.isnan().any()) for output in outputs):
        broken = [key for key, x in model.named_parameters() if not bool(x.detach().isfinite().all())]
        if broken:
            raise CheckFailed(
                f"{name}: the untouched model's own outputs hold NaN. Likely cause: NaN or infinity in its weights "
                f"{listed(broken)}, from a training run that diverged or a damaged file. Nothing was measured."
            )
        raise CheckFailed(
            f"{name}: the untouched model's own outputs hold NaN. Likely cause: overflow in its precision, or padding "
            "in float64, which transformers' eager attention turns into NaN. Nothing was measured."
        )


def compare_outputs(found: list[Tensor], expected: list[Tensor], name: str) -> None:
    """Raise if two runs differ by more than rounding, padding included. Both used the same functions and masks."""
    if len(found) != len(expected):
        raise CheckFailed(f"{name}: {len(found)} outputs under the probe, {len(expected)} without.")
    for ours, theirs in zip(found, expected, strict=True):
        if ours.shape != theirs.shape:
            raise CheckFailed(f"{name}: output {tuple(ours.shape)} under the probe, {tuple(theirs.shape)} without.")
        eps = torch.finfo(theirs.dtype).eps
        height = _height(theirs)
        pairs = list(zip(_pieces(ours), _pieces(theirs), strict=True))
        if not all(torch.allclose(x, y, rtol=16 * eps, atol=16 * eps * height) for x, y in pairs):
            raise CheckFailed(
                f"{name}: outputs under the probe differ from those of the untouched model by "
                f"{max(float((x - y).abs().max()) for x, y in pairs):.2g} of {height:.2g}. Likely cause: the model "
                "takes another path or builds another mask where its attention is not eager. Nothing was measured."
            )


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor into pieces of a million numbers: logits over a large vocabulary are a scan's largest tensor."""
    return x.flatten().split(1 << 20)


def _height(x: Tensor) -> float:
    """The largest finite magnitude."""
    return max((float(piece.nan_to_num(0, 0, 0).abs().max()) for piece in _pieces(x) if piece.numel()), default=0.0)


def floating_tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = tuple(output.values())
    return [x for part in output for x in floating_tensors(part)] if isinstance(output, tuple | list) else []


def attended(call: Call) -> tuple[Tensor, Tensor]:
    """The outputs of a call, and the product of its weights with two columns: ones, and ones on the later half of keys.

    On a CPU the columns are appended to the values at almost no cost. GPU kernels accept only certain widths, so there
    the product is separate.
    """
    m, width = call.k.shape[-2], call.v.shape[-1]
    columns = torch.ones(m, 2, dtype=call.q.dtype, device=call.q.device)
    columns[: m // 2 + 1, 1] = 0
    if call.q.device.type != "cpu":
        return call.forward(), call.softmaxes.operator() @ columns
    values = torch.cat([call.v, columns.expand(*call.v.shape[:-1], 2)], -1)
    out, sums = replace(call, v=values).forward().split([width, 2], -1)
    return out, sums


def check_call(call: Call, out: Tensor, products: Tensor) -> None:
    """Raise unless rows sum to one, no query of a causal layer sees a later key, and outputs are finite.

    products   the two columns of `attended`, or of an `Attending`: the sum of each row, and its mass on the later half
               of the keys, which queries of the first half must not see
    """
    n, m = call.q.shape[-2], call.k.shape[-2]
    real = call.real[:, None, :]
    sums, ahead = products.unbind(-1)
    # Sums are computed in float32 or better and rounded once to the model's precision.
    slack = 4 * torch.finfo(call.q.dtype).eps + m * torch.finfo(torch.float32).eps
    over = sums > 1 + slack
    under = sums < (1 - slack if call.sink is None else 0)
    if bool(((over | under | ~sums.isfinite()) & real).any()):
        wrong = sums[((over | under | ~sums.isfinite()) & real)]
        raise CheckFailed(f"{call.name}: a row sums to {float(wrong[0])}, expected 1. Nothing more was measured.")
    if call.kind == "causal" and n == m and bool((ahead[..., : m // 2 + 1] != 0).any()):
        raise CheckFailed(f"{call.name}: a query sees a later key in a causal layer. Nothing more was measured.")
    # A finite sum means that all numbers are finite; computing it takes a tenth of the time.
    if not out.sum(dtype=torch.float64).isfinite() and bool((~out.isfinite() & real[..., None]).any()):
        raise CheckFailed(f"{call.name}: outputs are not finite. Likely cause: overflow in {call.q.dtype}.")
