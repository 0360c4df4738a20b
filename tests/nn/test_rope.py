"""Rotary positions, against multiplication by complex numbers."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from heedful.nn import Rope
from heedful.segments import from_cu_seqlens, from_lengths

LAYOUTS = pytest.mark.parametrize("interleaved", [False, True])


def by_complex_numbers(x, positions, *, base=10000.0, width=None, interleaved=False, scaling=1.0):
    """Each pair as one complex number times e^{iθ}, in float64, pair by pair."""
    width = x.shape[-1] if width is None else width
    out = x.double().clone()
    for t in range(width // 2):
        first, second = (2 * t, 2 * t + 1) if interleaved else (t, t + width // 2)
        theta = positions.double() / scaling * base ** (-2 * t / width)
        z = torch.complex(x[..., first].double(), x[..., second].double()) * torch.polar(torch.ones_like(theta), theta)
        out[..., first], out[..., second] = z.real, z.imag
    return out


@LAYOUTS
@pytest.mark.parametrize("options", [{}, {"base": 500.0}, {"width": 6}, {"width": 0}, {"scaling": 4.0}], ids=str)
@pytest.mark.parametrize("n", [0, 1, 63])
def test_rotation_is_multiplication_by_complex_numbers(options, interleaved, n):
    x = torch.randn(2, 3, n, 16, dtype=torch.float64)
    expected = by_complex_numbers(x, torch.arange(n), interleaved=interleaved, **options)
    assert torch.allclose(Rope(16, interleaved=interleaved, **options)(x), expected, rtol=0, atol=1e-13)


def test_the_two_layouts_differ_by_a_permutation_of_the_numbers():
    x = torch.randn(5, 8, dtype=torch.float64)
    order = torch.arange(8).view(2, 4).mT.flatten()  # interleaved place → half-split place
    assert torch.allclose(Rope(8, interleaved=True)(x[:, order]), Rope(8)(x)[:, order])
    assert not torch.allclose(Rope(8, interleaved=True)(x), Rope(8)(x))


@LAYOUTS
@pytest.mark.parametrize("shift", [1, 1000, 10**6])
def test_inner_products_depend_on_the_distance_alone(interleaved, shift):
    rope = Rope(16, interleaved=interleaved)
    q, k = torch.randn(2, 20, 16, dtype=torch.float64).unbind()
    here = rope(q) @ rope(k).mT
    there = rope(q, offset=shift) @ rope(k, offset=shift).mT
    assert torch.allclose(here, there, atol=1e-8)
    assert not torch.allclose(here, rope(q, offset=1) @ rope(k).mT, atol=1e-3)


@LAYOUTS
def test_norms_are_kept(interleaved):
    x = torch.randn(3, 50, 16)
    assert torch.allclose(Rope(16, width=12, interleaved=interleaved)(x, offset=777).norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("split", [0, 1, 7, 12])
def test_an_offset_continues_the_whole(split):
    x, rope = torch.randn(2, 12, 8), Rope(8)
    parts = torch.cat([rope(x[:, :split]), rope(x[:, split:], offset=split)], -2)
    assert torch.equal(parts, rope(x))


@pytest.mark.parametrize("position", [0, 10**3, 10**6])
def test_float32_is_as_good_far_out_as_near(position):
    x = torch.randn(100, 64)
    error = (Rope(64)(x, offset=position).double() - by_complex_numbers(x, torch.arange(100) + position)).abs().max()
    assert error <= 4 * torch.finfo(torch.float32).eps * x.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_costs_one_rounding(dtype):
    x = torch.randn(200, 64).to(dtype)
    exact = by_complex_numbers(x, torch.arange(200) + 5000)
    error = (Rope(64)(x, offset=5000).double() - exact).abs()
    one_rounding = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).smallest_normal
    assert (error <= one_rounding * 1.001 + 1e-6).all()


def test_positions_count_from_the_start_of_each_segment():
    rope, x = Rope(8), torch.randn(3, 10, 8)
    packed = rope(x, segments=from_cu_seqlens(torch.tensor([0, 4, 10])))
    assert torch.equal(packed[:, :4], rope(x[:, :4])) and torch.equal(packed[:, 4:], rope(x[:, 4:]))
    lengths = torch.tensor([10, 6, 3])
    padded = rope(x, segments=from_lengths(lengths, 10, padding="left"))
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(padded[row, 10 - length :], rope(x[row, 10 - length :]))


def test_positions_broadcast_over_heads():
    x, positions = torch.randn(2, 3, 4, 8), torch.randint(0, 99, (2, 4))
    expected = by_complex_numbers(x, positions[:, None].expand(2, 3, 4)).float()
    assert torch.allclose(Rope(8)(x, positions[:, None]), expected, atol=1e-6)


def test_the_gradient_is_the_rotation_back():
    x = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: Rope(8, width=6)(x, offset=3), x)


def test_it_holds_no_state_and_survives_pickle_deepcopy_and_a_cast_to_bfloat16():
    rope, x = Rope(8, base=77.0, width=4, interleaved=True, scaling=2.0), torch.randn(5, 8)
    assert not rope.state_dict() and not list(rope.buffers())
    for twin in (pickle.loads(pickle.dumps(rope)), copy.deepcopy(rope), copy.deepcopy(rope).bfloat16()):
        assert torch.equal(twin(x), rope(x))
    assert repr(rope) == "Rope(8, base=77, width=4, interleaved=True, scaling=2)"


def test_it_compiles_whole():
    rope, x = Rope(8), torch.randn(2, 7, 8)
    compiled = torch.compile(lambda x, segments: rope(x, segments=segments), backend="aot_eager", fullgraph=True)
    ids = from_lengths(torch.tensor([7, 3]), 7)
    assert torch.allclose(compiled(x, ids), rope(x, segments=ids))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Rope(7), "width: expected an even number in 0…7"),
        (lambda: Rope(8, width=10), "got 10"),
        (lambda: Rope(8, base=0.0), "base: expected > 0"),
        (lambda: Rope(8, scaling=-1.0), "scaling: expected > 0"),
        (lambda: Rope(8)(torch.zeros(4, 6)), r"x: shape \(4, 6\), expected \(\*batch, n, 8\)"),
        (lambda: Rope(8)(torch.zeros(8)), "x: shape"),
        (lambda: Rope(8)(torch.zeros(4, 8), torch.arange(5)), r"positions: .*\(5,\), expected integers \(\*batch, 4\)"),
        (lambda: Rope(8)(torch.zeros(4, 8), torch.arange(4.0)), "positions: torch.float32"),
        (lambda: Rope(8)(torch.zeros(4, 8), torch.arange(4), segments=torch.zeros(4, dtype=int)), "expected one of"),
    ],
)
def test_bad_input_gets_a_sentence(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_the_fastest_pair_turns_by_one_radian_a_position():
    rope = Rope(2, base=100.0)  # one pair: frequency 1
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(rope(x, torch.tensor([1])), torch.tensor([[math.cos(1), math.sin(1)]], dtype=torch.float64))
