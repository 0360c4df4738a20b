"""Products of 16-bit q and k with float32 columns in Triton (interpreted where there is no GPU), against float64."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful import linalg
from heedful.kernels import dispatch
from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.kernels.row_statistics.sums import Request

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LONGFORMER = h.Global((0, 1)) | h.Window(5, 5)
IDS = [[0] * 15 + [3] * 17 + [-1] * 3 + [1] * 14, [-1] * 9 + [5] * 20 + [2] * 20]


@pytest.fixture
def products(monkeypatch, small_tiles):
    """The products with tiles as small as those of the other kernels."""
    from heedful.kernels.launching import LaunchCache
    from heedful.kernels.softmax import products

    small = small_tiles.Config(16, 16, 4, 1)
    monkeypatch.setattr(products, "CONFIGS", {key: dict.fromkeys(x, small) for key, x in products.CONFIGS.items()})
    monkeypatch.setattr(products, "READY", LaunchCache())
    monkeypatch.setattr(products, "SPLIT_ROWS", 16)
    return products


@pytest.fixture
def reached(monkeypatch, products):
    """`products`, and the dispatcher taken in: it finds the interpreted kernels within reach."""
    monkeypatch.setattr(dispatch, "triton_unavailable", lambda q: [])
    return products


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def kept_low(x):
    assert x.dtype.itemsize > 2, "raised to float32"
    return x


def inputs(batch, n, d, *, keys=None, m=None, dtype=torch.bfloat16):
    return draw(*batch, n, d, dtype=dtype), draw(*(keys or batch), m or n, d, seed=1, dtype=dtype)


def error(got, want):
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert got.isfinite().all()
    return ((got - want).norm() / want.norm().clamp(min=1e-9)).item()


CASES = {
    "window": (h.Window(20), dict(batch=(2,), n=49, d=16), {}),
    "window both ways, sinks": (h.Window(9, 5, sinks=3), dict(batch=(1,), n=63, d=16), {}),
    "many sinks": (h.Window(2, sinks=35), dict(batch=(1,), n=63, d=8), {}),
    "blocks, odd width": (h.Blocks(12), dict(batch=(1,), n=63, d=5), {}),
    "longformer": (LONGFORMER, dict(batch=(1,), n=63, d=16), {}),
    "causal longformer": (LONGFORMER & h.Causal(), dict(batch=(1,), n=49, d=16), {}),
    "causal in parts": (h.Causal(), dict(batch=(1,), n=140, d=16), {}),
    "full, float16": (h.Full(), dict(batch=(1,), n=49, d=16, dtype=torch.float16), {}),
    "more queries than keys": (h.Full(), dict(batch=(1,), n=90, m=17, d=16), {}),
    "after a cache": (h.Window(9, sinks=3), dict(batch=(1,), n=20, m=63, d=16), {}),
    "one query": (h.Causal(), dict(batch=(2,), n=1, m=49, d=16), {}),
    "no batch axes": (h.Causal(), dict(batch=(), n=20, d=16), {}),
    "shared heads": (h.Window(9, sinks=3), dict(batch=(2, 1, 2), keys=(2, 1, 1), n=24, d=16), {}),
    "packed": (h.Window(7), dict(batch=(2, 1), n=49, d=16), dict(packed=True)),
    "packed longformer": (LONGFORMER, dict(batch=(2, 1), n=49, d=16), dict(packed=True)),
    "packed, shared heads": (h.Causal(), dict(batch=(2, 1, 2), keys=(2, 1, 1), n=49, d=16), dict(packed=True)),
    "a cap": (h.Causal(), dict(batch=(1,), n=30, d=16), dict(softcap=1.5)),
    "a sink": (h.Window(9), dict(batch=(1, 2), n=30, d=16), dict(sink=(0.5, 2.0), temperature=0.8)),
}


def built(case):
    """q, k, the mechanism and the segments of a case."""
    pattern, sizes, options = CASES[case]
    options = dict(options)
    q, k = inputs(**sizes)
    segments = None
    if options.pop("packed", False):
        segments = torch.tensor(IDS, device=DEVICE).view(2, *(1,) * (q.ndim - 3), 49)
    if "sink" in options:
        options["sink"] = torch.tensor(options["sink"], device=DEVICE)
    return q, k, h.Softmax(pattern, **options), segments


def arguments(q, k, mechanism, segments):
    return q, k, mechanism.rows(), mechanism.pattern, segments, mechanism.score_scale(q.shape[-1])


@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_the_definition(products, fenced, case):
    q, k, mechanism, segments = built(case)
    given = arguments(q, k, mechanism, segments)
    assert products.objections(*given) == []
    found = products.Products(*given)
    a = mechanism.matrix(q.double(), k.double(), segments=segments)
    x, y = draw(*a.shape[:-2], a.shape[-1], 20, seed=2), draw(*a.shape[:-1], 20, seed=3)
    assert error(found.apply(x), a @ x.double()) < 4e-7
    assert error(found.adjoint(y), a.mT @ y.double()) < 4e-7


@pytest.mark.parametrize("columns, d", [(1, 64), (30, 64), (130, 16)])
def test_any_number_of_columns_of_any_size_and_layout(products, fenced, columns, d):
    """Columns are scaled one by one: a large one does not drown a small one, and zeros stay zeros."""
    q, k = inputs((2,), 40, d)
    a = h.Softmax().matrix(q.double(), k.double())
    found = products.Products(*arguments(q, k, h.Softmax(), None))
    sizes = torch.logspace(-30, 30, columns, dtype=torch.float64).float().to(DEVICE)
    x = draw(2, 40, columns, seed=2) * sizes
    x[..., columns // 2] = 0
    for given in (x, x.mT.contiguous().mT, torch.stack([x, x], -1)[..., 0]):
        out = found.apply(given)
        want = a @ x.double()
        assert ((out - want).norm(dim=-2) <= 4e-7 * want.norm(dim=-2)).all()
    assert found.apply(x[..., :0]).shape == (2, 40, 0)


def test_elements_of_all_sizes_in_one_column(products):
    """What is lost of the smallest is 2⁻⁴⁰ of the largest, not 2⁻²⁴ as in float16 alone."""
    q, k = inputs((1,), 64, 16)
    a = h.Softmax(h.Full()).matrix(q.double(), k.double())
    x = draw(1, 64, 3, seed=2) * torch.logspace(0, -9, 64, device=DEVICE)[:, None]
    found = products.Products(*arguments(q, k, h.Softmax(h.Full()), None))
    sizes = a @ x.double().abs()
    assert ((found.apply(x) - a @ x.double()).abs() <= 2**-20 * sizes).all()
    tail = x.clone()
    tail[:, 0] = 0
    beside = found.apply(x) - a[..., :1].float() * x[:, :1]
    assert (beside - a @ tail.double()).abs().max() <= 2**-22 * x.abs().max()


def test_more_heads_than_q_and_k_have(reached):
    q, k = inputs((3,), 20, 16)
    op = h.Softmax().operator(q, k).float()
    a = h.Softmax().matrix(q.double(), k.double())
    x = draw(2, 3, 20, 4, seed=2)
    assert error(op @ x, a @ x.double()) < 4e-7
    assert error(op.mT @ x, a.mT @ x.double()) < 4e-7


def test_what_stands_in_padding_goes_nowhere(products):
    q, k, mechanism, segments = built("packed")
    dead = segments[..., None] < 0
    x = draw(2, 1, 49, 5, seed=2)
    clean = products.Products(*arguments(q, k, mechanism, segments))
    dirty = [t.masked_fill(dead, torch.nan) for t in (q, k, x)]
    found = products.Products(*arguments(*dirty[:2], mechanism, segments))
    assert torch.equal(found.apply(dirty[2]), clean.apply(x))
    assert torch.equal(found.adjoint(dirty[2]), clean.adjoint(x))


def test_runs_are_bit_equal_and_nan_is_not_hidden(products):
    q, k = inputs((1,), 40, 16)
    found = products.Products(*arguments(q, k, h.Softmax(h.Window(7)), None))
    x = draw(1, 40, 5, seed=2)
    assert torch.equal(found.apply(x), found.apply(x))
    assert torch.equal(found.adjoint(x), found.adjoint(x))
    for bad in (torch.nan, torch.inf):
        y = x.clone()
        y[0, 3, 2] = bad
        assert not found.apply(y)[0, 3:11, 2].isfinite().any()
        assert torch.equal(found.apply(y)[..., :2], found.apply(x)[..., :2])


@pytest.mark.parametrize("case", ["longformer", "shared heads", "packed", "a sink"])
def test_the_raised_operator_keeps_q_and_k(reached, case, monkeypatch):
    """`float()` gives an operator in float32, linear and self-adjoint to float32's rounding, that raises nothing."""
    q, k, mechanism, segments = built(case)
    op = mechanism.operator(q, k, segments=segments).float()
    assert op.dtype == op.mT.dtype == torch.float32 and op.fused and op.mT.fused
    a = mechanism.matrix(q.double(), k.double(), segments=segments)
    assert error(op.to_dense(), a) < 1e-6
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", kept_low)
        x = draw(a.shape[-1], 3, seed=2)
        assert error(op @ x, a @ x.double()) < 4e-7
        assert error(op.mT @ draw(a.shape[-2], 3, seed=3), a.mT @ draw(a.shape[-2], 3, seed=3).double()) < 4e-7
    if segments is None:
        linalg.check_linear(op)
    sums = op.row_sums(Request())
    assert error(sums.square, a.square().sum(-1)) < 1e-6
    assert error(sums.total, a.sum(-1)) < 1e-6


def test_what_is_certain_of_the_spectrum_stays_so(reached, monkeypatch):
    """From products alone, the bounds hold around the singular values of the definition in float64."""
    from heedful.kernels.softmax import launches
    from heedful.measures import search

    large = launches.Config(128, 64, 4, 1)
    for module in (launches, reached):
        monkeypatch.setattr(module, "CONFIGS", {key: dict.fromkeys(x, large) for key, x in module.CONFIGS.items()})
    monkeypatch.setattr(search, "pays_to_form", lambda op: False)
    q, k = inputs((), 200, 16)
    q = 2 * q
    found = h.spectrum(h.Softmax().operator(q, k), 6, tau=0.9, search=h.SearchOptions(200))
    with h.backend("torch"):
        raised = h.spectrum(h.Softmax().operator(q.float(), k.float()), 6, tau=0.9, search=h.SearchOptions(200))
    torch.testing.assert_close(found.values, raised.values, rtol=1e-6, atol=0)  # from the same starts
    exact = torch.linalg.svdvals(h.Softmax().matrix(q.double(), k.double())).cpu()
    assert (found.values[:6].cpu() <= exact[:6] * (1 + 1e-6)).all()
    rank = h.effective_rank(found, 0.9)
    shares = exact.square().cumsum(-1) / exact.square().sum()
    assert int(rank.lower) <= int((shares < 0.9).sum()) + 1 <= int(rank.upper)


def test_gradients_checks_and_other_backends_go_the_old_way(reached, monkeypatch):
    q, k = inputs((1,), 20, 16)
    op = h.Softmax().operator(q, k).float()
    x = draw(1, 20, 2, seed=2)
    near = op @ x
    monkeypatch.setattr(reached.Products, "apply", None)
    op = h.Softmax().operator(q, k).float()
    with h.backend("torch"):
        torch.testing.assert_close(op @ x, near)
    with h.check_finite(), pytest.raises(ValueError, match="v: "):
        op @ x.masked_fill(x > 0, torch.nan)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad((op @ leaf).sum(), leaf)
    torch.testing.assert_close(grad, op.mT @ torch.ones_like(x))


def test_what_it_cannot_take_it_says(products):
    q, k = inputs((1,), 20, 16)
    rest = SoftmaxRows(), h.Causal(), None, 0.25
    assert products.objections(q, k, *rest) == []
    assert "16 bits" in " ".join(products.objections(q.float(), k.float(), *rest))
    assert "more than a window" in " ".join(products.objections(q, k, SoftmaxRows(), h.Strided(3), None, 0.25))


def test_without_a_gpu_q_and_k_are_raised():
    if ON_GPU:
        pytest.skip("there is a GPU")
    q, k = inputs((2,), 30, 16)
    x = draw(30, 3, seed=2)
    raised, op = h.Softmax().operator(q.float(), k.float()), h.Softmax().operator(q, k).float()
    assert torch.equal(op @ x, raised @ x)
    assert torch.equal(op.mT @ x, raised.mT @ x)
    assert torch.equal(op.materialise(), raised.materialise())


def test_fused_products_are_preferred_to_a_large_matrix(reached, monkeypatch):
    """On a GPU, which materialises as large a head whose products are not fused."""
    from heedful.measures import search

    class OnGpu:
        def __init__(self, op, n):
            self.shape, self.fused, self.device = (n, n), op.fused, torch.device("cuda")
            self.entries = n * n

    q, k = inputs((), 40, 16)
    fused = h.Softmax().operator(q, k).float()
    with h.backend("torch"):
        raised = h.Softmax().operator(q, k).float()
    assert fused.fused and not raised.fused and not h.Softmax().operator(q, k).fused
    assert [search.pays_to_form(OnGpu(fused, n)) for n in (4096, 8192)] == [True, False]
    assert [search.pays_to_form(OnGpu(raised, n)) for n in (8192, 16384)] == [True, False]
