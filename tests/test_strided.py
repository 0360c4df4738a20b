"""Softmax over strided patterns runs inside residue classes and is softmax, however the pattern is written."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import heedful as h
from heedful.kernels.blocked.reference import blocked
from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.kernels.row_statistics import row_statistics
from heedful.kernels.row_statistics.sums import Request
from heedful.kernels.softmax.recognise import StridedKeys, StridedWindow, recognise
from heedful.kernels.softmax.strided import merged
from heedful.patterns import FAR, Offsets, balanced_tree
from heedful.testing import CHECKS, Case, DoesNotApply
from heedful.testing.case import assert_agrees, dense, oracles, with_gradients


def strided(stride, window=None, causal=True):
    """Every `stride`-th key, and the `window` nearest ones, the query's own among them."""
    pattern = h.Strided(stride)
    if window is not None:
        pattern = pattern | h.Window(window - 1, 0 if causal else window - 1)
    return pattern & h.Causal() if causal else pattern


# The laws at a small size, and the options of real use for the check of the cost.
MECHANISMS = {
    "with a window": (lambda: h.Softmax(strided(4, 9)), lambda: h.Softmax(strided(64, 128))),
    "both ways, window": (lambda: h.Softmax(strided(4, 6, False)), lambda: h.Softmax(strided(128, 128, False))),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_strided_attention_keeps_the_contract(name, check, request):
    if check != "compiled_equals_eager":
        request.getfixturevalue("annotations_enforced")
    small, large = MECHANISMS[name]
    try:
        CHECKS[check](Case(small, large=large))
    except DoesNotApply as why:
        pytest.skip(str(why))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("stride, window", [(1, 3), (7, None), (7, 1), (7, 7), (7, 15), (300, 40)])
@pytest.mark.parametrize("n, m", [(1, 1), (49, 49), (150, 150), (13, 150), (1, 29)])
def test_it_is_softmax_over_the_pattern_with_each_key_once(stride, window, causal, n, m):
    mechanism = h.Softmax(strided(stride, window, causal))
    generator = torch.Generator().manual_seed(n * 1000 + m)
    q, k, v, weight = (
        torch.randn(2, size, width, generator=generator, dtype=torch.float64)
        for size, width in ((n, 5), (m, 5), (m, 3), (n, 3))
    )
    assert ("→ strided" in mechanism.explain(q, k, v)) == (stride > 1)
    want = oracles(lambda *x: with_gradients(lambda *y: dense(mechanism, *y), x, weight), q, k, v, terms=m + 5)
    got = with_gradients(mechanism, (q, k, v), weight)
    for name, one, other in zip(("output", "grad q", "grad k", "grad v"), got, want, strict=True):
        assert_agrees(one, other, f"{name} of {mechanism}", "a key in both parts is counted twice, or in neither")


@pytest.mark.parametrize("causal", [True, False])
def test_tiles_of_any_size_give_the_same(causal, monkeypatch):
    mechanism = h.Softmax(strided(6, 8, causal))
    q, k, v = torch.randn(3, 3, 2, 101, 4, dtype=torch.float64).unbind()
    want = dense(mechanism, q, k, v)
    for rows, budget in ((1, 1), (3, 40), (5, 200), (64, 1 << 12)):
        monkeypatch.setattr(merged, "ROWS", rows)
        monkeypatch.setattr(merged, "BUDGET", budget)
        assert torch.allclose(mechanism(q, k, v), want, atol=1e-12)


def test_the_cost_counts_the_pairs_of_the_pattern():
    mixed = (h.Strided(4) | h.Strided(6) | h.Window(3, 1)) & h.Window(20, 7)
    shapes = (5, None, True), (5, 3, True), (3, 11, True), (4, None, False), (4, 6, False)
    for pattern in (*(strided(*shape) for shape in shapes), h.Window(5, 2), mixed):
        for n, m in ((0, 0), (1, 1), (20, 20), (7, 33), (1, 40)):
            pairs = int(pattern.allows(torch.arange(m - n, m)[:, None], torch.arange(m)).expand(n, m).sum())
            assert h.Softmax(pattern).cost(h.Dims(n, m, 2, 3)).flops == 10 * pairs, (pattern, n, m)


def test_no_tensor_grows_with_the_square_of_the_length():
    seen = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            found = out if isinstance(out, tuple | list) else [out]
            seen.extend(x.untyped_storage().nbytes() for x in found if isinstance(x, torch.Tensor))
            return out

    q, k, v = (torch.randn(8192, 8, requires_grad=True) for _ in range(3))
    with Sizes():
        h.Softmax(strided(128, 128))(q, k, v).sum().backward()
    assert max(seen) <= 4 * merged.BUDGET + 4096  # one tile


def test_a_pattern_is_recognised_however_it_is_written():
    stride, window, causal = h.Strided(4), h.Window(2), h.Causal()
    back, both = Offsets(FAR, 0, 4), Offsets(FAR, FAR, 4)
    merged = StridedWindow(back, Offsets(2, 0))
    for pattern in ((stride | window) & causal, causal & (window | stride), (stride & causal) | window):
        assert recognise(pattern) == merged
    assert recognise(stride) == recognise(stride | h.Strided(8)) == StridedKeys(both)
    assert recognise(stride & h.Window(9, 5)) == StridedKeys(Offsets(8, 4, 4))
    assert recognise(stride | h.Window(8, 4)) == StridedWindow(both, Offsets(7, 3))  # the stride has the outermost
    assert [recognise(pattern) for pattern in RUN_BY["torch"]] == [None] * len(RUN_BY["torch"])


@pytest.mark.parametrize("window, runs", [(None, "strided"), (3, "torch")])
def test_segments_give_what_the_separate_sequences_give(window, runs):
    mechanism = h.Softmax(strided(4, window))
    q, k, v = torch.randn(3, 2, 20, 4, dtype=torch.float64).unbind()
    ids = torch.tensor([0] * 7 + [1] * 13)
    assert mechanism.explain(q, k, v, segments=ids).endswith(f"→ {runs}")
    apart = torch.cat([mechanism(*(x[:, part] for x in (q, k, v))) for part in (slice(0, 7), slice(7, 20))], -2)
    assert torch.allclose(mechanism(q, k, v, segments=ids), apart)
    with h.backend("torch"):
        forced = mechanism(q, k, v)
    assert torch.allclose(forced, mechanism(q, k, v))
    plain = blocked(q, k, v, SoftmaxRows(), mechanism.pattern, None, 0.5)
    assert torch.equal(forced, plain)


def test_temperature_divides_the_logits():
    q, k, v = torch.randn(3, 2, 50, 4, dtype=torch.float64).unbind()
    for window in (None, 3):
        warm, cold = (h.Softmax(strided(4, window), temperature=heat) for heat in (2.0, 1.0))
        assert torch.allclose(warm(q, k, v), cold(q / 2, k, v))


SINK = torch.linspace(-1, 1, 2, dtype=torch.float64)
OPTIONS = [{}, {"softcap": 2.0}, {"sink": SINK}, {"sink": SINK, "softcap": 1.0, "temperature": 1.7}]
TREE = h.Tree(balanced_tree(41), 2)
RUN_BY = {  # what a pattern is chooses the kernel, not how it is written
    "strided": [
        h.Causal() & h.Strided(4),
        h.Strided(7),
        h.Strided(100),
        h.Strided(5) & h.Window(20, 10),
        h.Strided(3) & (h.Causal() | h.Window(0, 4)),
        (h.Strided(3) | h.Strided(9)) & h.Causal(),
        h.Strided(2) & h.Strided(3) & (h.Window(13) | h.Causal()),
    ],
    "strided-window": [
        h.Strided(4) | h.Window(9),
        h.Causal() & (h.Window(9, 9) | h.Strided(4)),
        (h.Strided(4) & h.Causal()) | h.Window(3, 5),
        (h.Strided(4) & h.Window(28)) | h.Window(3, 1),
        h.Window(1) | (h.Window(20, 12) & h.Strided(4)),
        h.Strided(100) | h.Window(2),
    ],
    "neighbours": [
        TREE,
        h.Causal() & TREE & h.Window(9, 9),
        TREE | h.Window(2),
        (h.Window(1, 1) | TREE) & h.Causal(),
        TREE | h.Tree(tuple(range(-1, 40)), 1),
    ],
    "torch": [
        h.Strided(4) | h.Strided(6),
        h.Causal() | h.Strided(4),
        h.Strided(4) & h.Window(8, sinks=1),
        TREE | h.Window(500),
        h.Blocks(4) & h.Strided(2),
    ],
}


@pytest.mark.parametrize("pattern", [pattern for kind in RUN_BY.values() for pattern in kind], ids=repr)
@pytest.mark.parametrize("n, m", [(41, 41), (13, 41)])
def test_the_kernel_made_for_a_pattern_gives_outputs_adjoints_and_gradients(pattern, n, m):
    name = next(name for name, kind in RUN_BY.items() if pattern in kind)
    q, k, v, y = (torch.randn(2, 2, size, w, dtype=torch.float64) for size, w in ((n, 5), (m, 5), (m, 3), (n, 3)))
    assert h.Softmax(pattern).explain(q, k, v).endswith(f"→ {name}")
    for mechanism in (*(h.Softmax(pattern, **option) for option in OPTIONS), h.Quadratic(pattern=pattern)):
        A = mechanism.matrix(q, k)
        got = with_gradients(mechanism, (q, k, v), y)
        want = with_gradients(partial(dense, mechanism), (q, k, v), y)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        operator = mechanism.operator(q, k)
        for _ in range(2):  # the second product uses what the first remembered
            torch.testing.assert_close(operator.mT @ y, A.mT @ y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pattern", RUN_BY["strided"], ids=repr)
@pytest.mark.parametrize("n, m", [(41, 41), (13, 41), (1, 1)])
def test_row_sums_inside_classes_are_those_of_the_matrix(pattern, n, m):
    mechanism = h.Softmax(pattern, sink=SINK)
    q, k, values = (torch.randn(3, 2, size, w, dtype=torch.float64) for size, w in ((n, 5), (m, 5), (m, 4)))
    columns, targets = torch.randn(m, 3, dtype=torch.float64), torch.randint(-1, m, (2, n, 4))
    bands = ((-9, 2), (None, -1), (1, 2), (None, None))
    request = Request(targets, bands, columns, values=values)
    inputs = q, k, mechanism.rows(), pattern, None, mechanism.score_scale(5), request
    assert row_statistics.choose(*inputs).name == "strided"
    got, A = mechanism.row_sums(q, k, request), mechanism.matrix(q, k)
    offset = torch.arange(m) - torch.arange(m - n, m)[:, None]
    inside = [((least is None) | (offset >= (least or 0))) & ((most is None) | (offset <= (most or 0)))
              for least, most in bands]  # fmt: skip
    wanted = {
        "total": A.sum(-1),
        "square": A.square().sum(-1),
        "largest": A.amax(-1),
        "where": A.argmax(-1),
        "count": (A > 0).sum(-1),
        "at": A.gather(-1, targets.clamp(min=0).expand(3, -1, -1, -1)) * (targets >= 0),
        "band_mass": torch.stack([(A * some).sum(-1) for some in inside], -1),
        "band_dot": torch.stack([(A * some) @ columns for some in inside], -2),
        "product": A @ values,
    }
    for name, want in wanted.items():
        torch.testing.assert_close(getattr(got, name), want, rtol=0, atol=1e-12, msg=lambda m, name=name: name + m)
    assert torch.equal(got.seen, got.at > 0)


def test_parameters_of_the_row_function_get_gradients_in_every_kernel():
    q, k, v = torch.randn(3, 2, 41, 4, dtype=torch.float64).unbind()
    for pattern in (h.Strided(4) & h.Causal(), TREE):
        sink = torch.nn.Parameter(SINK.clone())
        mechanism = h.Softmax(pattern, sink=sink)
        (got,) = torch.autograd.grad(mechanism(q, k, v).square().sum(), sink)
        (want,) = torch.autograd.grad((mechanism.matrix(q, k) @ v).square().sum(), sink)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("made, pattern", [
    (lambda: h.StridedSoftmax(4, 3, temperature=2.0), strided(4, 3)),
    (lambda: h.StridedSoftmax(4, temperature=2.0), strided(4)),
    (lambda: h.StridedSoftmax(4, 3, causal=False, temperature=2.0), strided(4, 3, False)),
    (lambda: h.DilatedSoftmax(5, 4, temperature=2.0), h.Strided(4) & h.Window(16)),
    (lambda: h.DilatedSoftmax(5, 4, False, temperature=2.0), h.Strided(4) & h.Window(16, 16)),
    (lambda: h.TreeSoftmax([1, -1, 1], 1, temperature=2.0), h.Tree((1, -1, 1), 1)),
    (lambda: h.TreeSoftmax([1, -1, 1], 1, True, temperature=2.0), h.Tree((1, -1, 1), 1) & h.Causal()),
])  # fmt: skip
def test_names_of_release_0_1_give_softmax_over_their_pattern(made, pattern):
    with pytest.warns(DeprecationWarning, match="will go in the next release"):
        mechanism = made()
    assert type(mechanism) is h.Softmax and mechanism.pattern == pattern and mechanism.temperature == 2


@pytest.mark.parametrize("made, name", [
    (lambda: h.StridedSoftmax(0), "stride"),
    (lambda: h.StridedSoftmax(4, 0), "window"),
    (lambda: h.DilatedSoftmax(4.0, 2), "window"),
    (lambda: h.DilatedSoftmax(4, 0), "gap"),
    (lambda: h.build("dilated", window=0), "window"),
    (lambda: h.build("dilated", gap=0), "stride"),
])  # fmt: skip
def test_a_bad_option_is_named(made, name):
    with pytest.raises(ValueError, match=name):
        made()


class FlashByDefinition:
    """torch's flash operators, which exist on a GPU alone, as their definitions: what views and merge rely on."""

    @staticmethod
    def _visible(n, m):
        return torch.arange(n)[:, None] >= torch.arange(m)

    def _scaled_dot_product_flash_attention(self, q, k, v, p, causal, debug, scale):
        s = (q @ k.mT * scale).masked_fill(~self._visible(q.shape[-2], k.shape[-2]), -torch.inf)
        return s.softmax(-1) @ v, s.logsumexp(-1), *[None] * 7

    def _scaled_dot_product_flash_attention_backward(self, g, q, k, v, o, lse, *rest, scale):
        s = (q @ k.mT * scale).masked_fill(~self._visible(q.shape[-2], k.shape[-2]), -torch.inf)
        P = (s - lse[..., None]).exp()
        ds = P * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.mT @ q, P.mT @ g


@pytest.fixture
def flash():
    """The module; its programs run interpreted here, on tensors of the CPU."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("Triton is not interpreted where there is a GPU")
    from heedful.kernels.softmax.strided import flash

    return flash


@pytest.mark.parametrize("stride, window", [(4, None), (4, 4), (4, 9), (7, 3), (50, 20)])
@pytest.mark.parametrize("n", [1, 45])
def test_views_and_merge_of_the_gpu_form_are_softmax_over_the_pattern(stride, window, n, flash, monkeypatch):
    monkeypatch.setattr(flash, "aten", FlashByDefinition())
    mechanism = h.Softmax(strided(stride, window))
    q, k, v = (torch.randn(2, 3, n, 16, requires_grad=True) for _ in range(3))
    g = torch.randn(2, 3, n, 16)
    inputs = mechanism.rows(), mechanism.pattern, None, mechanism.score_scale(16)
    out = flash.attend(q, k, v, *inputs)
    wanted = mechanism.matrix(q, k) @ v
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    for one, other in zip(
        torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(wanted, (q, k, v), g), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flash.adjoint(q, k, g, *inputs), mechanism.matrix(q, k).mT @ g, rtol=1e-4, atol=1e-5)


def test_the_gpu_form_says_what_it_cannot_take(flash):
    q = torch.randn(2, 3, 10, 8)
    assert "GPU" in flash.objections(q, q, q, SoftmaxRows(), strided(4), None, 1.0)[0]
    assert [flash.Shape.of(strided(4, window)) for window in (None, 7, 8)] == [(4, 0), (4, 7), (4, 8)]
    for pattern in (strided(4, 9, False), h.Strided(4) & h.Window(8), (h.Strided(4) & h.Window(28)) | h.Window(3)):
        assert flash.Shape.of(pattern) is None
