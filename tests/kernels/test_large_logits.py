"""Exponential features at large logits, in Triton: rows whose features lie far below the largest key so far.

On a GPU at the sizes that once gave NaN, infinity and rows of zeros; interpreted at smaller ones.
"""

from __future__ import annotations

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

import heedful as h  # noqa: E402
from heedful.kernels.linear_attention import LinearCall  # noqa: E402
from heedful.kernels.random_features import reference  # noqa: E402
from heedful.segments import from_lengths  # noqa: E402

pytest.importorskip("triton", reason="triton is not installed")
from heedful.kernels import launching  # noqa: E402
from heedful.kernels.chunked_linear import triton as given  # noqa: E402
from heedful.kernels.random_features import triton as made  # noqa: E402

SIZES = [(n, d) for n in (5, 64, 65) for d in (16, 32, 64, 128)] if ON_GPU else [(5, 4)]
FEATURES = 256 if ON_GPU else 20
SPREAD = 16 if ON_GPU else 60  # of few features, so that some rows need those far below the largest key
NAMES = ["favor+", "favor++", "favor#"] if ON_GPU else ["favor+"]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """NaN in every output and workspace beforehand: what is not written shows."""
    fresh = lambda shape, like, dtype=torch.float32: torch.full(shape, torch.nan, dtype=dtype, device=like.device)  # noqa: E731
    monkeypatch.setattr(launching, "empty", fresh)


def draw(*shape, seed=0, spread=1.0, dtype=torch.float32):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread
    return x.to(DEVICE).to(dtype).requires_grad_()


def dense(x, y, v, *, causal=True, ids=None):
    """The definition in log space, from logarithms of features, in the dtype it is given."""
    y, v = (t.repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (y, v))
    logs = (x[..., :, None, :] + y[..., None, :, :]).logsumexp(-1)
    sees = torch.ones(logs.shape[-2:], dtype=torch.bool, device=x.device)
    sees = sees.tril() if causal else sees
    if ids is not None:
        sees = sees & (ids[:, None, :, None] == ids[:, None, None, :]) & (ids >= 0)[:, None, :, None]
    logs = logs.masked_fill(~sees, -torch.inf)
    total = logs.logsumexp(-1, keepdim=True)
    return ((logs - total.masked_fill(total == -torch.inf, 0)).exp()).to(v.dtype) @ v


def compare(call, naive, truth, leaves, largest, *, logs=False):
    """Output and gradients err at most twice as much as those of the naive way, or by what rounding explains.

    That is a rounding of the result and, as the logarithm of a weight is known to ε·largest, one of its terms: of the
    gradient of q a term is do·v k, or do·v where q holds logarithms itself.
    """
    results = []
    for function, dtype in ((call, None), (naive, None), (truth, torch.float64)):
        own = [x.detach().to(dtype or x.dtype).requires_grad_() for x in leaves]
        out = function(*own)
        above = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
        results.append([x.double() for x in (out.detach(), *torch.autograd.grad(out, own, above))])
    q, k, v = (x.detach().abs().max().item() for x in leaves)
    most, relative = 3.0, 2 * torch.finfo(leaves[0].dtype).eps + largest * torch.finfo(torch.float32).eps
    sizes = v, most * v * (1 if logs else k), most * v * (1 if logs else q), most
    for name, got, other, want, size in zip(("output", *"qkv"), *results, sizes, strict=True):
        assert got.isfinite().all(), name
        error, allowed = ((x - want).abs().max().item() for x in (got, other))
        assert error <= max(2 * allowed, relative * size), (name, error, allowed, relative * size)
    return results[0][0]


CASES = {
    "causal": dict(),
    "packed, shared heads": dict(KV=1, ids="packed"),
    "padded": dict(ids="padded"),
    "not causal": dict(causal=False, KV=1),
}


@pytest.mark.parametrize("launches", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_rows_far_below_the_largest_key_are_taken_in_log_space(case, launches, monkeypatch):
    options = dict(CASES[case])
    if launches < 3 and not options.get("causal", True):
        pytest.skip("where nothing is causal there are three launches")
    if launches > 1 and "ids" in options and not ON_GPU:
        pytest.skip("an interpreted row takes long, and the rows are the same however chunks are joined")
    for name, value in (("joined", lambda *_: launches), ("span", lambda *_: 64), ("SETUPS", launching.LaunchCache())):
        monkeypatch.setattr(given.launches, name, value)
    n, r, e, H = 70 if ON_GPU else 7, 20, 5, 2
    KV, ids = options.pop("KV", H), options.pop("ids", None)
    third = n // 3
    segments = {"packed": [0] * third + [1] * (n - third), "padded": [-1] * 2 + [0] * third + [-1] * (n - 2 - third)}
    ids = None if ids is None else torch.tensor([segments[ids]], device=DEVICE)
    leaves = [draw(1, H, n, r, spread=300), draw(1, KV, n, r, seed=1, spread=300), draw(1, KV, n, e, seed=2)]

    def naive(*x):
        return dense(*x, ids=ids, **options)

    def fused(*x):
        return given.chunked_linear(*x, feature="exp", segments=ids, **options)[0]

    out = compare(fused, naive, naive, leaves, largest=1e3, logs=True)
    real = torch.ones(1, n, dtype=torch.bool, device=DEVICE) if ids is None else ids >= 0
    assert (out.abs().amax(-1) > 0)[:, 0][real].all() and not out.transpose(1, 2)[~real].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_features_made_in_the_kernel_at_large_logits(n, d, causal, dtype):
    feature_map = h.FavorPlus(d, FEATURES).to(DEVICE)
    logs = feature_map.linear_logs()
    options = dict(query_weight=logs.query_weight, key_weight=logs.key_weight, bias=logs.bias, curvature=logs.curvature)
    leaves = [
        draw(1, H, n, d, seed=i, spread=s, dtype=dtype) for i, (H, s) in enumerate(((2, SPREAD), (1, SPREAD), (1, 1)))
    ]

    def naive(q, k, v):
        wide = torch.promote_types(q.dtype, torch.float32)
        given = {name: x.to(wide) if torch.is_tensor(x) else x for name, x in options.items()}
        return dense(*reference.log_features(q, k, **given), v, causal=causal)

    def fused(q, k, v):
        return made.random_features(q, k, v, **options, causal=causal)

    out = compare(fused, naive, naive, leaves, largest=1e4)
    assert (out.abs().amax(-1) > 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_packed_and_padded_calls_at_large_logits(name, kind, n, d):
    """float32, q and k of standard deviation 8; columns of features beyond the last one were infinite."""
    mechanism = h.CATALOG[name].build(d=d, features=FEATURES).to(DEVICE)
    leaves = [draw(2, 2, n, width, seed=i, spread=s) for i, (width, s) in enumerate(((d, 8), (d, 8), (d, 1)))]
    packed = torch.arange(n).ge(n // 2).long().expand(2, n)
    ids = (packed if kind == "packed" else from_lengths(torch.tensor([n, n // 2]), n)).to(DEVICE)
    wide = h.CATALOG[name].build(d=d, features=FEATURES).to(DEVICE).double()

    def fused(*tokens):
        tokens = [x.masked_fill(ids[:, None, :, None] < 0, 0) for x in tokens]
        inputs, options = LinearCall(*tokens, mechanism._options(), ids[:, None]).chunks
        assert not given.objections(*inputs, **options)
        return given.chunked_linear(*inputs, **options)[0]

    def naive(q, k, v):
        return mechanism.matrix(q, k, segments=ids[:, None]) @ v

    compare(fused, naive, lambda q, k, v: wide.matrix(q, k, segments=ids[:, None]) @ v, leaves, largest=1e3)


@pytest.mark.skipif(not ON_GPU, reason="the dispatcher chooses Triton on a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["favor+", "favor++", "favor#", "hedgehog", "linear-exp", "lowrank-sparse"])
@pytest.mark.parametrize("kind", ["plain", "packed", "padded"])
def test_mechanisms_on_a_gpu_at_large_logits(name, kind, dtype):
    for n, d in SIZES:
        facts = dict(d=d) if name in ("favor+", "favor++", "favor#", "hedgehog", "lowrank-sparse") else {}
        mechanism, wide = (h.CATALOG[name].build(**facts).to(DEVICE) for _ in range(2))
        mechanism, wide = mechanism.to(dtype), wide.to(dtype).double()
        q, k, v = (draw(2, 2, n, d, seed=i, spread=s, dtype=dtype).detach() for i, s in enumerate((8, 8, 1)))
        ids = None
        if kind != "plain":
            packed = torch.arange(n).ge(n // 2).long().expand(2, n)
            ids = (packed if kind == "packed" else from_lengths(torch.tensor([n, n // 2]), n)).to(DEVICE)[:, None]
        got, naive = mechanism(q, k, v, segments=ids), mechanism.matrix(q, k, segments=ids) @ v
        want = wide.matrix(q.double(), k.double(), segments=ids) @ v.double()
        assert got.isfinite().all()
        error, allowed = ((x.double() - want).abs().max().item() for x in (got, naive))
        floor = torch.finfo(dtype).eps * want.abs().max().item()
        assert error <= max(2 * allowed, 1e-3 if dtype == torch.float32 else floor), (n, d, error, allowed)
