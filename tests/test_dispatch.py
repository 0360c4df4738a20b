"""Which backend runs, and what is said about it."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.cli.mechanism_facts import catalogue
from heedful.kernels.dispatch import Backend, Kernel, asked_for


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


def test_every_backend_that_is_shown_can_be_asked_for(x):
    shown = {name for facts in catalogue() for name in facts["kernels"].split(", ") if name}
    assert {"sdpa", "triton", "torch", "cpu_groups"} <= shown <= set(h.backend.names)
    for mechanism in (h.Softmax(), h.Linear(h.FavorPlus(4, 8)), h.GatedLinear(4)):
        *lines, chosen = h.backend.explain(mechanism, x, x, x).splitlines()
        for name in [line.partition(":")[0] for line in lines] + [chosen.removeprefix("→ ")]:
            with h.backend(name):
                assert asked_for() == name


def test_one_kernel_alone_can_be_asked_for(x):
    linear = h.Linear(h.FavorPlus(4, 8))
    with h.backend("softmax/torch"):
        assert h.backend.explain(h.Softmax(), x, x, x).endswith("→ torch")
        assert h.backend.explain(linear, x, x, x).endswith("→ random_features/cpu_groups")
    with h.backend("chunked_linear/torch"):
        told = h.backend.explain(linear, x, x, x)
        assert told.endswith("→ chunked_linear/torch") and '"chunked_linear/torch") was asked for' in told
        assert torch.allclose(linear(x, x, x), linear.matrix(x, x) @ x, atol=1e-5)


def test_a_former_name_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match="'cpu_groups'"), h.backend("groups"):
        assert asked_for() == "cpu_groups"


def counted(asked, kind=None):
    """A kernel of two backends that writes down which of them it asks."""

    def objections(name, why):
        return lambda *inputs: asked.append(name) or why

    first = Backend("sdpa", lambda *inputs: 1, objections("sdpa", ["no"]))
    return Kernel("test", first, Backend("torch", lambda *inputs: 2, objections("torch", [])), kind=kind)


def test_a_kind_of_input_is_decided_once(x):
    asked = []
    kernel = counted(asked, kind=lambda x: x.shape)
    assert [kernel(x), kernel(x + 1), kernel.choose(x).name] == [2, 2, "torch"]
    assert asked == ["sdpa", "torch"]
    assert kernel.explain(x) == "test/sdpa: no\ntest/torch: can run\n→ torch"
    assert asked == ["sdpa", "torch"]
    kernel(x[:1])
    with torch.no_grad():
        kernel(x)
    with h.backend("torch"):
        kernel(x)
    assert asked == ["sdpa", "torch"] * 3 + ["torch"]


def test_inputs_whose_values_matter_are_decided_at_each_call(x):
    asked = []
    kernel = counted(asked, kind=lambda x: None)
    assert [kernel(x), kernel(x)] == [2, 2] and asked == ["sdpa", "torch"] * 2
    bias = torch.zeros(1, 20)
    attend = h.Softmax(h.Full(), bias=bias)
    assert h.backend.explain(attend, x, x, x).endswith("→ sdpa")
    bias.fill_(-torch.inf)
    assert h.backend.explain(attend, x, x, x).endswith("→ torch")
    assert torch.equal(attend(x, x, x), torch.zeros_like(x))


def test_a_backend_yields_to_a_faster_one_that_can_run(x):
    fast = Backend("triton", lambda x: 2, lambda x: ["too many"] if len(x) > 1 else [])
    slow = Backend("sdpa", lambda x: 1, lambda x: [], yields=lambda x: {"triton": "it is slow"})
    kernel = Kernel("test", slow, fast, Backend("torch", lambda x: 3, lambda x: []))
    assert kernel(x[:1]) == 2 and "test/sdpa: it is slow" in kernel.explain(x[:1])
    assert kernel(x) == 1
    with h.backend("sdpa"):
        assert kernel(x[:1]) == 1


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
