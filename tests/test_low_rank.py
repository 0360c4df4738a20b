"""Linformer, Nyström and the truncated SVD: what rank r can do, whom a projection may mix, and how they refuse."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import heedful as h
from heedful.mechanisms import nystrom
from heedful.mechanisms.linformer import Linformer
from heedful.mechanisms.nystrom import Nystrom, inverse_times, iterated_inverse, landmarks
from heedful.mechanisms.truncated_svd import TruncatedSVD
from heedful.segments import from_lengths
from heedful.testing import CHECKS, Case, DoesNotApply, FlopCounter

CASES = {
    "linformer": Case(partial(Linformer, 2048, 8, heads=2), large=partial(Linformer, 2048, heads=2)),
    "linformer, E and F": Case(partial(Linformer, 2048, 8, shared=False, scale=0.5)),
    "linformer, pooled, uneven pieces": Case(partial(Linformer, 1000, 7, projection="pooled"), length=1000),
    "linformer, random": Case(partial(Linformer, 2048, 8, projection="random", shared=False, heads=2)),
    "nystrom": Case(partial(Nystrom, 8), large=Nystrom),
    "nystrom, more landmarks than some have tokens": Case(partial(Nystrom, 64, iterations=4, scale=0.7)),
    "truncated svd": Case(partial(TruncatedSVD, 4), length=257),
    "truncated svd, of a matrix of low rank": Case(lambda: TruncatedSVD(3, Linformer(257, 8, heads=2)), length=257),
    "truncated svd, of causal attention": Case(lambda: TruncatedSVD(4, h.Softmax(h.Causal())), length=257),
}
ANY = {
    "linformer": partial(Linformer, 64, 8),
    "nystrom": partial(Nystrom, 8),
    "truncated svd": partial(TruncatedSVD, 8),
}
every = pytest.mark.parametrize("build", ANY.values(), ids=list(ANY))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", CASES)
def test_the_contract_holds(name, check, request):
    if "causal" in name and check in ("forward_is_matrix_times_v", "empty_sequences_work"):
        pytest.skip("the causal mechanism inside takes no more queries than keys")
    if check == "compiled_equals_eager" and "," in name:
        pytest.skip("the variants compile as the first of them does")
    if check != "compiled_equals_eager":  # the compiler would trace the annotation checker
        request.getfixturevalue("annotations_enforced")
    try:
        CHECKS[check](CASES[name])
    except DoesNotApply as why:
        pytest.skip(str(why))


@every
def test_the_rank_is_at_most_r(build):
    q, k = draw(2, 3, 60, 8).unbind()
    sigma = torch.linalg.svdvals(build().double().matrix(3 * q, 3 * k))
    assert (sigma[..., 7] > 1e-6 * sigma[..., 0]).all() and (sigma[..., 8:] < 1e-12 * sigma[..., :1]).all()


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_no_mechanism_of_rank_r_is_nearer_to_softmax_than_the_truncated_svd(spread):
    q, k = (spread * draw(2, 4, 60, 8)).unbind()
    A = h.Softmax(h.Full()).matrix(q, k)
    best = torch.linalg.matrix_norm(TruncatedSVD(8).matrix(q, k) - A)
    sigma = torch.linalg.svdvals(A)
    torch.testing.assert_close(best, sigma[..., 8:].square().sum(-1).sqrt(), rtol=1e-10, atol=1e-13)
    rivals = [Nystrom(8), *(Linformer(60, 8, projection=kind) for kind in ("learned", "pooled", "random"))]
    for rival in rivals:
        assert (torch.linalg.matrix_norm(rival.double().matrix(q, k) - A) > best).all(), rival


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every
def test_sixteen_bits_are_as_good_as_their_inputs_and_outputs(build, dtype):
    q, k, v = draw(3, 4, 60, 8, dtype=dtype).unbind()
    mechanism = build()  # parameters stay in float32
    want = build().double()(q.double(), k.double(), v.double())
    got = mechanism(q, k, v)
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() < 8 * torch.finfo(dtype).eps * want.abs().max()


@every
def test_autocast_stays_outside(build):
    mechanism, (q, k, v) = build(), draw(3, 4, 60, 8, dtype=torch.float32).unbind()
    plain, adjoint = mechanism(q, k, v), mechanism.operator(q, k).mT @ v
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mechanism(q, k, v), plain)
        assert torch.equal(mechanism.operator(q, k).mT @ v, adjoint)


# Linformer.


def test_linformer_is_the_papers_formula():
    q, k, v = draw(3, 2, 30, 8).unbind()
    attend = Linformer(30, 5, shared=False).double()
    scores = q @ (attend.E @ k).mT / 8**0.5
    want = scores.softmax(-1) @ (attend.F @ v)
    torch.testing.assert_close(attend(q, k, v), want, rtol=1e-12, atol=1e-13)


def test_pooled_keys_are_the_means_of_consecutive_pieces():
    E = Linformer(7, 3, projection="pooled").E
    third, half = 1 / 3, 1 / 2
    want = [[third] * 3 + [0] * 4, [0] * 3 + [half] * 2 + [0] * 2, [0] * 5 + [half] * 2]
    torch.testing.assert_close(E, torch.tensor(want))


def test_a_shorter_sequence_is_one_followed_by_zeros():
    q, k, v = draw(3, 2, 20, 8).unbind()
    attend = Linformer(30, 5).double()
    zeros = torch.zeros(2, 10, 8).double()
    longer = attend(q, torch.cat([k, zeros], -2), torch.cat([v, zeros], -2))
    torch.testing.assert_close(attend(q, k, v), longer, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("projection", ["learned", "random", "pooled"])
def test_only_learned_projections_are_parameters(projection):
    attend = Linformer(30, 5, projection=projection, shared=False)
    held = dict(attend.named_parameters() if projection == "learned" else attend.named_buffers())
    assert {name: tuple(x.shape) for name, x in held.items()} == {"E": (5, 30), "F": (5, 30)}
    assert set(attend.state_dict()) == {"E", "F"}
    assert all(x.dtype == torch.float32 for x in held.values())


def test_equal_seeds_draw_equal_projections_and_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    one, same, other = Linformer(30, 5, seed=1), Linformer(30, 5, seed=1), Linformer(30, 5, seed=2)
    assert torch.equal(one.E, same.E) and not torch.equal(one.E, other.E)
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_reach_float32_projections_from_sixteen_bits():
    attend = Linformer(30, 5, shared=False)
    attend(*draw(3, 2, 20, 8, dtype=torch.bfloat16).unbind()).sum().backward()
    for P in (attend.E, attend.F):
        assert P.grad.dtype == torch.float32
        assert P.grad[:, :20].abs().min() > 0 and (P.grad[:, 20:] == 0).all()


def test_heads_with_their_own_projections_may_have_their_own_segments():
    q, k, v = draw(3, 2, 3, 12, 8).unbind()
    attend = Linformer(12, 4, heads=3, shared=False).double()
    ids = torch.stack([from_lengths(torch.tensor([12, 7, 3]), 12), from_lengths(torch.tensor([0, 12, 5]), 12)])
    out = attend(q, k, v, segments=ids)
    torch.testing.assert_close(out, attend.matrix(q, k, segments=ids) @ v, rtol=1e-12, atol=1e-13)
    for b in range(2):
        for head in range(3):
            alone = Linformer(12, 4, shared=False).double()
            alone.load_state_dict({"E": attend.E[head], "F": attend.F[head]})
            size = int((ids[b, head] >= 0).sum())
            want = alone(*(x[b, head, :size] for x in (q, k, v)))
            torch.testing.assert_close(out[b, head, :size], want, rtol=1e-12, atol=1e-13)


def test_a_pack_may_be_longer_than_any_sequence_in_it():
    q, k, v = draw(3, 25, 8).unbind()
    attend = Linformer(10, 4).double()
    ids = torch.tensor([0] * 10 + [1] * 10 + [-1] * 5)
    out = attend(q, k, v, segments=ids)
    torch.testing.assert_close(out[10:20], attend(q[10:20], k[10:20], v[10:20]), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(out, attend.matrix(q, k, segments=ids) @ v, rtol=1e-12, atol=1e-13)
    for call in (lambda ids: attend(q, k, v, segments=ids), lambda ids: attend.matrix(q, k, segments=ids)):
        with pytest.raises(ValueError, match=r"k: a sequence of 11 tokens, expected at most length = 10"):
            call(torch.tensor([0] * 11 + [1] * 9 + [-1] * 5))


@pytest.mark.parametrize("batch", [1, 3])
def test_heads_that_a_layer_leaves_side_by_side_are_mixed_alike_and_their_gradients_lie_as_they_do(batch):
    attend = Linformer(20, 16, shared=False).double()
    joined = draw(3, batch, 20, 2, 8)
    split = [x.transpose(1, 2).requires_grad_() for x in joined]
    apart = [x.detach().contiguous().requires_grad_() for x in split]
    wanted, above = list(attend.parameters()), draw(batch, 2, 20, 8)
    ours, theirs = (torch.autograd.grad(attend(*x), [*x, *wanted], above) for x in (split, apart))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    assert all(grad.stride() == x.stride() for grad, x in zip(ours, split, strict=False))


# Nyström.


@pytest.mark.parametrize("n, m", [(12, 12), (7, 12), (12, 7), (1, 9), (5, 200)])
def test_nystrom_is_softmax_where_every_token_of_one_side_is_a_landmark(n, m):
    q, k, v = 2 * draw(n, 8, seed=1), 2 * draw(m, 8, seed=2), draw(m, 3, seed=3)
    attend = Nystrom(12, iterations=40)
    torch.testing.assert_close(attend(q, k, v), h.Softmax(h.Full())(q, k, v), rtol=1e-6, atol=1e-6)


def test_landmarks_are_means_of_all_tokens():
    for n, count in ((12, 4), (13, 4), (15, 4), (3, 4), (1, 1)):
        x = draw(2, n, 3)
        pieces = x.tensor_split(min(n, count), -2)
        torch.testing.assert_close(landmarks(x, count), torch.stack([p.mean(-2) for p in pieces], -2))


@pytest.mark.parametrize("iterations", [1, 3, 6])
def test_the_iterate_acts_on_singular_values_alone(iterations):
    """z ← ¼ z (13 − σz (15 − σz (7 − σz))) from σ / (‖W‖₁ ‖W‖∞): another way to the same matrix, through an SVD."""
    W = draw(3, 10, 6).softmax(-1)
    U, sigma, Vh = torch.linalg.svd(W, full_matrices=False)
    z = sigma / (torch.linalg.matrix_norm(W, 1) * torch.linalg.matrix_norm(W, torch.inf))[:, None]
    for _ in range(iterations):
        p = sigma * z
        z = z * (13 - p * (15 - p * (7 - p))) / 4
    want = Vh.mT @ (z[..., None] * U.mT)
    torch.testing.assert_close(iterated_inverse(W, iterations), want, rtol=1e-9, atol=1e-11)
    X = draw(3, 10, 2, seed=1)
    torch.testing.assert_close(inverse_times(W, X, iterations), want @ X, rtol=1e-9, atol=1e-11)


def iterate_as_written(W, X, iterations):
    norms = torch.linalg.matrix_norm(W, 1) * torch.linalg.matrix_norm(W, torch.inf)
    Z, eye = W.mT / norms[..., None, None], torch.eye(W.shape[-2], dtype=W.dtype)
    for _ in range(iterations):
        Z = Z @ (13 * eye - W @ Z @ (15 * eye - W @ Z @ (7 * eye - W @ Z))) / 4
    return Z @ X


@pytest.mark.parametrize("a, c", [(7, 7), (8, 5), (5, 8)])
@pytest.mark.parametrize("iterations", [1, 2, 3, 4, 6])
def test_the_gradient_of_the_iterate_is_that_of_its_definition(a, c, iterations):
    scores, X, above = draw(2, 3, a, c).requires_grad_(), draw(3, a, 4, seed=1).requires_grad_(), draw(2, 3, c, 4)
    for wanted in ([scores, X], [scores], [X]):
        ours, theirs = (
            torch.autograd.grad(times(scores.softmax(-1), X, iterations), wanted, above)
            for times in (inverse_times, iterate_as_written)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [0.1, 1, 3, 6])
def test_the_shorter_way_to_the_iterate_costs_no_precision_that_attention_has(size, monkeypatch):
    q, k, v, above = (scale * draw(2, 256, 32, seed=i) for i, scale in enumerate((size, size, 1, 1)))
    attend = Nystrom(64)

    def run(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, above.to(dtype))

    ours = run(torch.float32)
    monkeypatch.setattr(nystrom, "inverse_times", iterate_as_written)
    for short, long, want in zip(ours, run(torch.float32), run(torch.float64), strict=True):
        assert (short - want).norm() <= 2 * (long - want).norm()


def test_the_iterate_converges_to_the_pseudo_inverse():
    W = (3 * draw(3, 10, 6)).softmax(-1)
    torch.testing.assert_close(iterated_inverse(W, 30), torch.linalg.pinv(W), rtol=1e-8, atol=1e-8)


def test_the_inverse_of_a_matrix_does_not_depend_on_its_batch_mates():
    W = (3 * draw(2, 10, 10)).softmax(-1)
    alike = torch.full((10, 10), 0.0).double()
    alike[:, 0] = 1  # ‖·‖₁ = 10: a norm over the batch would slow the others down
    assert torch.equal(iterated_inverse(torch.stack([W[0], alike]), 6)[0], iterated_inverse(W, 6)[0])


def test_equal_landmarks_are_no_accident():
    q, k, v = draw(1, 8).expand(40, 8), draw(1, 8, seed=1).expand(40, 8), draw(40, 3)
    torch.testing.assert_close(Nystrom(8)(q, k, v), v.mean(0).expand(40, 3), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("build", [partial(Linformer, 4096, 16), partial(Nystrom, 16)], ids=["linformer", "nystrom"])
def test_work_and_memory_grow_with_the_length_and_no_faster(build):
    attend, seen = build(), {}
    for n in (2048, 4096):
        x = draw(1, n, 8, dtype=torch.float32)
        with torch.no_grad(), FlopCounter() as counter:
            attend(x, x, x)
        seen[n] = counter.flops
    assert seen[4096] < 2.01 * seen[2048]


# The truncated SVD.


@pytest.mark.parametrize("n, m, r", [(6, 6, 2), (5, 8, 3), (8, 5, 3), (4, 6, 9)])
def test_the_gradient_of_the_truncated_svd_is_its_derivative(n, m, r):
    q, k, v = (
        x.requires_grad_() for x in (2 * draw(2, n, 3, seed=1), 2 * draw(2, m, 3, seed=2), draw(2, m, 2, seed=3))
    )
    assert torch.autograd.gradcheck(TruncatedSVD(r), (q, k, v))


def test_the_gradient_is_that_of_torch_where_torch_has_one_and_finite_where_not():
    A, G = draw(20, 15, seed=1).requires_grad_(), draw(20, 15, seed=2)

    class Given(h.Softmax):
        def matrix(self, q, k, *, segments=None):
            return A

    q, k = draw(20, 3), draw(15, 3)
    (ours,) = torch.autograd.grad(TruncatedSVD(4, Given(h.Full())).matrix(q, k), A, G)
    U, sigma, Vh = torch.linalg.svd(A, full_matrices=False)
    (theirs,) = torch.autograd.grad(U[:, :4] * sigma[:4] @ Vh[:4], A, G)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    A = torch.diag(torch.tensor([3.0, 3.0, 2.0, 0.0, 0.0])).requires_grad_()  # equal among the kept, and the dropped
    q, k = draw(5, 3, dtype=torch.float32), draw(5, 3, dtype=torch.float32)
    (ours,) = torch.autograd.grad(TruncatedSVD(3, Given(h.Full())).matrix(q, k), A, torch.ones(5, 5))
    want = torch.ones(5, 5)
    want[3:, 3:] = 0
    torch.testing.assert_close(ours, want)


def test_all_of_the_rank_is_the_inner_mechanism_itself():
    q, k, v = draw(3, 2, 20, 8).unbind()
    inner = h.Softmax(h.Window(5))
    torch.testing.assert_close(TruncatedSVD(20, inner)(q, k, v), inner(q, k, v), rtol=1e-11, atol=1e-12)


def test_the_best_approximation_of_a_causal_matrix_is_not_causal():
    q, k = draw(2, 20, 8).unbind()
    mechanism = TruncatedSVD(3, h.Softmax(h.Causal()))
    assert isinstance(mechanism.pattern, h.Full)
    assert mechanism.matrix(q, k).triu(1).abs().max() > 1e-3


def test_one_svd_serves_all_products():
    q, k, x = draw(3, 20, 8).unbind()
    with FlopCounter() as counter:
        A = TruncatedSVD(3).operator(q, k)
        A @ x, A.mT @ x, A @ x
    once = 26 * 20**3
    assert counter.by_operation["aten::_linalg_svd"] == once
    q.requires_grad_()
    A = TruncatedSVD(3).operator(q, k)
    with torch.no_grad():
        A @ x
    (A @ x).sum().backward()
    (A @ x).sum().backward()
    assert q.grad.abs().max() > 0


# Errors.


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: Linformer(30, 5, pattern=h.Causal()), "pattern.*Causal.*no causal"),
        (lambda: Nystrom(8, pattern=h.Window(5)), "pattern.*Window.*no causal or sparse form"),
        (lambda: Linformer(5, 30), "rank: 30, expected at most length = 5.*swapped"),
        (lambda: Linformer(0), "length"),
        (lambda: Linformer(30, 0), "rank"),
        (lambda: Linformer(30, 5, heads=0), "heads"),
        (lambda: Linformer(30, 5, projection="conv"), "projection.*learned, pooled, random.*'conv'"),
        (lambda: Linformer(30, 5)(*torch.randn(3, 31, 8).unbind()), "k: a sequence of 31 tokens.*length = 30"),
        (lambda: Linformer(30, 5).matrix(*torch.randn(2, 31, 8).unbind()), "k: a sequence of 31 tokens.*length = 30"),
        (lambda: Linformer(30, 5, heads=4)(*torch.randn(3, 2, 30, 8).unbind()), r"\(2,\).*heads = 4"),
        (lambda: Linformer(30, 5, heads=4)(*torch.randn(3, 30, 8).unbind()), r"\(\).*heads = 4"),
        (lambda: Nystrom(0), "landmarks"),
        (lambda: Nystrom(8, iterations=0), "iterations"),
        (lambda: TruncatedSVD(0), "rank"),
    ],
)
def test_errors_say_what_is_wrong(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_the_inner_mechanism_must_be_one():
    with pytest.raises(TypeError, match=r"inner.*str"):
        TruncatedSVD(3, "softmax")


@every
def test_explain_and_repr_say_what_runs(build):
    q, k, v = draw(3, 20, 8, dtype=torch.bfloat16).unbind()
    assert build().explain(q, k, v)
    assert repr(build()).startswith(build.func.__name__)
