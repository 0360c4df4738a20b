"""Autocast stays outside: what a mechanism is given is what it computes in."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import heedful as h

MECHANISMS = {
    "dense": h.Softmax(h.Full()),
    "tiles": h.Softmax(h.Window(9)),
    "quadratic": h.Quadratic(),
    "linear": h.Linear(),
    "random features": h.Linear(h.FavorPlus(8, 16)),
    "retention": h.Retention(0.9),
    "fixed": h.FixedPattern("left"),
}


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=list(MECHANISMS))
def test_outputs_gradients_and_steps_are_those_without_autocast(mechanism):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, 8, requires_grad=True) for _ in range(3))

    def everything(context):
        with context:
            out = mechanism(q, k, v)
            adjoint = mechanism.operator(q.detach(), k.detach()).mT @ v.detach()
            state = mechanism.init_state(q, k, v)
            step, _ = mechanism.step(state, *(x[:, :1].detach() for x in (q, k, v)))
        return [out, adjoint, step, *torch.autograd.grad(out.sum(), (q, k, v))]  # torch asks for backward outside

    plain, under = everything(nullcontext()), everything(torch.autocast("cpu", torch.bfloat16))
    for ours, theirs in zip(under, plain, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
