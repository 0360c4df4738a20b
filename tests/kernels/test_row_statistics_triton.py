"""Row statistics in Triton (interpreted where there is no GPU), against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.kernels.row_statistics import reference
from heedful.kernels.row_statistics.sums import Request

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONGFORMER = h.Global((0, 1)) | h.Window(4, 4)
PACKED = [[0] * 11 + [3] * 14 + [-1] * 3 + [1] * 8, [5] * 20 + [2] * 16]


@pytest.fixture
def fused(monkeypatch, small_tiles):
    """The backend, which gathers little at a time."""
    from heedful.kernels.row_statistics import fused

    monkeypatch.setattr(fused, "GATHERED", 1000)
    return fused


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


CASES = {
    "sinks": (h.Window(6, 1, sinks=3), (2,), (2,), 30, None, {}),
    "shared heads, longformer": (LONGFORMER, (1, 2), (1, 1), 36, None, {}),
    "packed": (h.Window(5, 2, sinks=2), (2, 1), (2, 1), 36, PACKED, {}),
    "after a cache, capped": (h.Causal(), (1,), (1,), 12, None, dict(softcap=0.8)),
    "a sink": (h.Blocks(10), (1, 2), (1, 2), 36, None, dict(sink=torch.tensor([0.5, -1.0]), temperature=2.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_plain_torch_says(fused, fenced, case):
    pattern, batch, keys, n, ids, options = CASES[case]
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    q, k = draw(*batch, n, 16), draw(*keys, 36, 16, seed=1)
    segments = None if ids is None else torch.tensor(ids, device=DEVICE)[:, None]
    targets = torch.randint(-1, 36, (n, 3), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    bands = ((-2, 0), (None, -5), (1, None))
    rows = SoftmaxRows(**options)
    rest = pattern, segments, 0.3

    def asked(dtype):
        return Request(targets, bands, draw(36, 2, seed=3).to(dtype))

    want = reference.row_statistics(q, k, rows, *rest, asked(torch.float64))
    given = q.float(), k.float(), rows, *rest, asked(torch.float32)
    assert fused.objections(*given) == []
    got = fused.row_statistics(*given)
    for name, y in want.tensors().items():
        x = getattr(got, name)
        assert x.shape == y.shape, name
        if y.is_floating_point():
            torch.testing.assert_close(
                x.double(), y, rtol=3e-6, atol=3e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
        else:
            assert torch.equal(x, y), name


def test_nothing_but_whole_rows(fused):
    q, k = draw(2, 20, 8).float(), draw(2, 20, 8, seed=1).float()
    given = q, k, SoftmaxRows(), h.Causal(), None, 0.3, Request()
    want, got = reference.row_statistics(*given).tensors(), fused.row_statistics(*given).tensors()
    assert {name: x.shape for name, x in got.items()} == {name: x.shape for name, x in want.items()}
    assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in want.items()}


def test_what_it_cannot_take_it_says(fused):
    q = draw(2, 20, 8).float()
    pair = torch.zeros(20, dtype=torch.long, device=DEVICE), torch.zeros(20, dtype=torch.long, device=DEVICE)

    def said(rows=SoftmaxRows(), segments=None, request=Request()):  # noqa: B008
        return " ".join(fused.objections(q, q, rows, h.Causal(), segments, 0.3, request))

    assert said() == ""
    assert "only a softmax" in said(rows=h.Quadratic(h.no_activation, h.Full()).rows())
    assert said(segments=pair) == ""
    assert "separate segments" in said(segments=pair, request=Request(bands=((0, 1),)))
