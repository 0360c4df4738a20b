"""Which backend runs, and what is said about it."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.kernels.dispatch import Backend, Kernel


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(2, 20, 4)


def test_the_fused_kernel_runs_where_it_can(x):
    assert h.backend.explain(h.Softmax(), x, x, x).endswith("→ sdpa")


@pytest.mark.parametrize(
    ("mechanism", "reason"),
    [
        (h.Softmax(h.Window(3)), "dense n × m mask"),
        (h.Softmax(softcap=2.0), "no softcap"),
        (h.Softmax(sink=torch.zeros(())), "no sink"),
        (h.Softmax(bias=torch.zeros(20, 20)), "not both"),
        (h.Softmax(h.Full(), bias=torch.zeros(20, 20)), "rows of -inf"),
        (h.Softmax(h.Full(), bias=lambda i, j: 0.0 * (i - j)), "as a function"),
        (h.Softmax(h.Full(), bias=torch.full((1, 20), -torch.inf)), "all keys are masked"),
    ],
    ids=["window", "softcap", "sink", "causal bias", "bias", "function", "masked"],
)
def test_what_the_fused_kernel_can_not_take_it_says(mechanism, reason, x):
    said = h.backend.explain(mechanism, x, x, x)
    assert reason in said
    assert said.endswith("→ torch")


def test_queries_after_a_cache_are_not_left_to_a_mask_aligned_top_left(x):
    assert "top-left" in h.backend.explain(h.Softmax(), x[:, :5], x, x)
    assert h.backend.explain(h.Softmax(), x[:, :1], x, x).endswith("→ sdpa")


def test_a_bias_of_keys_alone_goes_through_the_fused_kernel(x):
    bias = torch.zeros(2, 1, 20)
    bias[:, :, 15:] = -torch.inf
    attend = h.Softmax(h.Full(), bias=bias)
    assert h.backend.explain(attend, x, x, x).endswith("→ sdpa")
    assert torch.allclose(attend(x, x, x), attend.matrix(x, x) @ x, atol=1e-6)


def test_a_backend_can_be_forced_and_is_given_back(x):
    with h.backend("torch"):
        assert h.backend.explain(h.Softmax(), x, x, x).endswith("→ torch")
        with h.backend(None):
            assert h.backend.explain(h.Softmax(), x, x, x).endswith("→ sdpa")
        assert torch.allclose(h.Softmax()(x, x, x), h.Softmax().matrix(x, x) @ x, atol=1e-6)
    assert h.backend.explain(h.Softmax(), x, x, x).endswith("→ sdpa")


def test_a_forced_backend_that_objects_is_an_error_with_its_reasons(x):
    with h.backend("sdpa"), pytest.raises(RuntimeError, match="dense n × m mask"):
        h.Softmax(h.Window(3))(x, x, x)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"cpu_groups, .*sdpa, .*torch, triton"):
        h.backend("cuda")


def test_the_first_backend_without_objections_runs(x):
    kernel = Kernel(
        "test",
        Backend("sdpa", lambda x: 1, lambda x: ["too small"] if x.numel() < 1000 else []),
        Backend("torch", lambda x: 2, lambda x: []),
    )
    assert kernel(x) == 2
    assert kernel(x.repeat(10, 1, 1)) == 1


def test_no_backend_left_is_an_error_that_lists_all_reasons(x):
    kernel = Kernel(
        "test", Backend("sdpa", lambda x: 1, lambda x: ["one"]), Backend("torch", lambda x: 2, lambda x: ["two"])
    )
    with pytest.raises(RuntimeError, match=r"(?s)sdpa: one.*torch: two"):
        kernel(x)


def test_check_finite_names_the_place_and_ends_with_its_block(x):
    bad = x.clone()
    bad[1, 3, 2] = torch.nan
    with h.check_finite(), pytest.raises(ValueError, match=r"k: 1 of 160 entries .* first at \(1, 3, 2\)"):
        h.Softmax()(x, bad, x)
    assert h.Softmax()(x, bad, x).isnan().any()


@pytest.mark.parametrize("m", [1, 5, 15, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nan_is_not_lost_over_few_keys(m, dtype):
    q, k = torch.randn(2, 3, 8, dtype=dtype), torch.randn(2, m, 8, dtype=dtype)
    q[:, 1] = torch.nan
    out = h.Softmax(h.Full())(q, k, k)
    assert out[:, 1].isnan().all() and not out[:, ::2].isnan().any()
