"""Every entry of the catalogue: how it is built, moved to another dtype or device, and called with one head."""

from __future__ import annotations

import inspect
import re
from functools import partial

import pytest
import torch

import heedful as h
from heedful.mechanisms import Linformer

ENTRIES = pytest.mark.parametrize("name", h.CATALOG)
FACTS = {"d": 8, "heads": 2, "length": 64}


def small(name: str) -> h.Mechanism:
    return h.CATALOG[name].sample(**FACTS)


# Options.


def required(name: str) -> set[str]:
    options = inspect.signature(h.CATALOG[name].build).parameters.values()
    return {option.name for option in options if option.default is option.empty}


@ENTRIES
def test_a_missing_option_is_named_with_its_meaning_and_an_example_that_works(name):
    try:
        mechanism = h.build(name)
    except TypeError as mistake:
        text = str(mistake)
        wanted = required(name) or {"length"}
        assert text.startswith(f"{name} needs ") and "_" not in text.split("For example")[0]
        for option, meaning in (("d", "d, the width of q and k"), ("length", "length, the number of tokens")):
            assert (meaning in text) == (option in wanted)
        mechanism = eval(re.search(r"For example: (heedful\.build\([^)]*\))", text)[1], {"heedful": h})
    else:
        assert not required(name)
    heads = getattr(mechanism, "heads", 1)
    q, k, v = torch.randn(3, 1, max(heads, 2), 5, 64).unbind()
    assert mechanism(q, k, v).shape == v.shape


def test_a_tree_needs_a_length_or_parents():
    with pytest.raises(TypeError, match=r"tree needs length.*heedful\.build\('tree', length=4096\).*parents="):
        h.build("tree", radius=1)
    assert h.build("tree", parents=(1, -1, 1)).pattern.parents == (1, -1, 1)


def test_several_missing_options_are_all_named(monkeypatch):
    def build(d, length, shape, heads=1):
        raise AssertionError

    monkeypatch.setitem(h.CATALOG, "gla", h.mechanisms.Entry("gla", build, "", "", h.CATALOG["gla"].paper, ""))
    with pytest.raises(TypeError, match=r"gla needs length, the .*; shape, .*build\('gla', length=4096, shape=…\)"):
        h.build("gla", d=8)


# Heads.


@ENTRIES
def test_one_head_needs_no_batch_axes(name):
    mechanism = h.CATALOG[name].sample(d=8, heads=1, length=64).double()
    q, k, v = torch.randn(3, 9, 8, dtype=torch.float64).unbind()
    if isinstance(mechanism, h.Mixture):
        q, k, v = (x.expand(mechanism.heads, -1, -1) for x in (q, k, v))
    torch.testing.assert_close(mechanism(q, k, v), mechanism.matrix(q, k) @ v)
    assert mechanism(q, k, v).shape == v.shape


# Precision.

CONSTANTS = {
    "linformer, pooled": partial(Linformer, 50, 7, projection="pooled", heads=2, shared=False),
    "linformer-sparse, pooled": partial(h.LinformerSparse, 50, 7, 3, projection="pooled"),
    "linformer, random": partial(Linformer, 50, 7, projection="random"),
    "retention, a decay for each head": partial(h.Retention, torch.tensor([0.9, 0.97], dtype=torch.float64)),
    "sum of given weights": partial(h.Sum, h.Softmax(), h.Linear(), weights=[0.7, 0.3]),
    "sum of given weights for each head": partial(h.Sum, h.Softmax(), h.Linear(), weights=[[0.7, 0.1], [0.3, 0.9]]),
    "favor++ with a given A": lambda: h.Linear(h.FavorPlusPlus(8, 16, A=-0.1)),
    "favor+, hadamard": lambda: h.Linear(h.FavorPlus(8, 16, orthogonal="hadamard")),
    "softmax with a temperature": partial(h.Softmax, temperature=0.7, scale=0.3),
    "nystrom": partial(h.Nystrom, 3),
} | {name: partial(small, name) for name in h.CATALOG}


@pytest.mark.parametrize("name", CONSTANTS)
def test_in_float64_it_is_the_float64_definition_whatever_it_was_before(name):
    """The definition is that of a mechanism made in float64, with what was drawn at random copied."""
    torch.set_default_dtype(torch.float64)
    try:
        made = CONSTANTS[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    q, k, v = torch.randn(3, 1, 2, 40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    for path in ([torch.float64], [torch.float32, torch.float16, torch.float64]):
        moved = CONSTANTS[name]()
        for dtype in path:
            moved = moved.to(dtype)
        drawn = {key for key, _ in made.named_parameters()}
        drawn |= {key for key, _ in made.named_buffers() if key.endswith(("omega", "signs", "norms"))}
        drawn |= {"E"} if getattr(made, "projection", None) == "random" else set()
        with torch.no_grad():
            for key, x in moved.state_dict(keep_vars=True).items():
                if key in drawn:
                    made.state_dict(keep_vars=True)[key].copy_(x)
            torch.testing.assert_close(moved(q, k, v), made.matrix(q, k) @ v, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(moved.matrix(q, k), made.matrix(q, k), rtol=1e-12, atol=1e-14)


def test_a_constant_that_was_written_to_stays_as_it_is():
    attend = Linformer(7, 3, projection="pooled")
    attend.E.mul_(-2)
    assert torch.equal(attend.double().E, (-2 * Linformer(7, 3, projection="pooled").E).double())
    phi = h.FavorPlusPlus(8, 16, A=-0.1)
    q, k = torch.randn(2, 1, 50, 8).unbind()
    phi.calibrate(q, k)
    fitted = phi.A.clone()
    assert torch.equal(phi.double().A, fitted.double())


# Devices.


def calls(mechanism, x):
    """Every way to use a mechanism, by name."""
    found = {
        "forward": lambda: mechanism(x, x, x),
        "matrix": lambda: mechanism.matrix(x, x),
        "operator": lambda: mechanism.operator(x, x),
    }
    if isinstance(mechanism, h.RecurrentMechanism):
        found["prefill"] = lambda: mechanism.prefill(x, x, x)
    if isinstance(mechanism, h.RecurrentMechanism) and x.device.type == "cpu":  # torch has no autocast to ask on meta
        found["step"] = lambda: mechanism.step(mechanism.init_state(x, x, x), *(x[..., :1, :] for _ in range(3)))
    return found


@ENTRIES
def test_a_mechanism_on_another_device_says_which_tensor_is_where(name):
    here, there = torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 9, 8, device="meta")
    for mechanism, x, wrong in ((small(name).to("meta"), here, "meta"), (small(name), there, "cpu")):
        tensors = [*mechanism.state_dict()]
        for what, call in calls(mechanism, x).items() if tensors else ():
            with pytest.raises(ValueError, match=r"mechanism\.to\(q\.device\)") as caught:
                call()
            text = str(caught.value)
            assert f"{tensors[0]!r} is on {wrong}, " in text or f"{tensors[0]!r} is on {wrong} and" in text, what
            assert f"but q is on {x.device}" in text


def test_the_device_is_looked_at_again_after_a_move():
    x = torch.randn(1, 2, 9, 8)
    mechanism = small("gla")
    mechanism(x, x, x)
    mechanism.to("meta")
    with pytest.raises(ValueError, match="'W' is on meta"):
        mechanism(x, x, x)
    layer = torch.nn.ModuleList([small("gla")])
    layer[0](x, x, x)
    layer.to("meta")
    with pytest.raises(ValueError, match="is on meta"):
        layer[0](x, x, x)


def test_segments_on_another_device_are_refused():
    x = torch.randn(1, 2, 9, 8)
    ids = torch.zeros(9, dtype=torch.long, device="meta")
    for segments, name in ((ids, "segments"), ((ids, ids), r"segments\[0\]")):
        with pytest.raises(ValueError, match=rf"{name}.*on meta, expected cpu"):
            h.Softmax()(x, x, x, segments=segments)


def test_public_names_differ_by_more_than_capitals():
    names = {name.lower() for name in h.__all__}
    assert len(names) == len(h.__all__)


def test_a_renamed_name_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"heedful\.identity is called heedful\.no_activation now"):
        assert h.identity is h.no_activation
    assert "identity" not in h.__all__


@pytest.mark.parametrize("name", h.CATALOG)
def test_a_mechanism_moves_to_a_device_without_float64(name):
    """As MPS is: it raises a TypeError for such a tensor."""

    def move(x):
        if x.dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        return x

    mechanism, x = small(name), torch.randn(1, 2, 9, 8)
    before = mechanism(x, x, x)
    torch.testing.assert_close(torch.nn.ModuleList([mechanism])._apply(move)[0](x, x, x), before)
    assert torch.float64 not in {x.dtype for x in mechanism.state_dict().values()}
