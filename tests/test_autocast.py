"""Autocast stays outside: what a mechanism is given is what it computes in."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import heedful as h


@pytest.mark.parametrize("entry", h.CATALOG.values(), ids=h.CATALOG)
def test_everything_is_as_without_autocast(entry):
    mechanism = entry.sample(d=8, heads=2, length=64)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, 8, requires_grad=True) for _ in range(3))

    def everything(context):
        with context:
            out = mechanism(q, k, v)
            results = [out, mechanism.matrix(q, k), mechanism.operator(q.detach(), k.detach()).mT @ v.detach()]
            if isinstance(mechanism, h.RecurrentMechanism):
                state = mechanism.init_state(q, k, v)
                results.append(mechanism.step(state, *(x[:, :1].detach() for x in (q, k, v)))[0])
        return [*results, *torch.autograd.grad(out.sum(), (q, k, v))]  # torch asks for backward outside

    plain, under = everything(nullcontext()), everything(torch.autocast("cpu", torch.bfloat16))
    for ours, theirs in zip(under, plain, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
