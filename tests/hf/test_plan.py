"""Plans: what they say, what their files look like, and which are refused."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'heedful[hf]'")

import zoo

import heedful as h
import heedful.hf as hf

SPECIES = {species.name: species for species in [*zoo.CAPTURED, *zoo.OTHERS]}


@pytest.fixture(scope="module")
def llama():
    return zoo.grow(SPECIES["llama"])


@pytest.fixture(scope="module")
def plan(llama):
    return hf.Plan.uniform(llama).edit("window-sinks", layers=1, units=[1], before=5, sinks=2)


def test_a_plan_names_each_unit_of_each_layer(plan):
    assert [own.layer.name for own in plan.layers] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert plan.layers[0].units == ("exact", "exact")
    assert plan.layers[1].by_head() == ("exact", "exact", *["window-sinks(before=5, sinks=2)"] * 2)
    assert "1 of 4 units: window-sinks(before=5, sinks=2)" in plan.table()


@pytest.mark.parametrize(("unit", "count"), [("head", 4), ("kv-group", 2), ("layer", 1)])
def test_units_are_heads_groups_or_layers(llama, unit, count):
    plan = hf.Plan.uniform(llama, "linear", unit=unit)
    assert plan.layers[0].units == ("linear",) * count and plan.layers[0].by_head() == ("linear",) * 4


def test_a_file_says_what_the_plan_says(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert hf.Plan.load(tmp_path / "plan.json") == plan
    text = (tmp_path / "plan.json").read_text()
    assert len(text.splitlines()) < 16 and json.loads(text)["heedful_plan"] == 1  # one line a layer


def test_a_plan_does_not_change(plan):
    with pytest.raises(FrozenInstanceError):
        plan.unit = "head"
    with pytest.raises(TypeError):
        plan.mechanisms["exact"] = None


def test_notes_travel_and_an_edit_drops_them(plan, tmp_path):
    from dataclasses import replace

    noted = replace(plan, measurements={"perplexity": 9.5})
    noted.save(tmp_path / "plan.json")
    assert hf.Plan.load(tmp_path / "plan.json").measurements["perplexity"] == 9.5
    assert not noted.edit("softmax").measurements


def test_the_cost_counts_keys_once_for_each_group(llama):
    dims = h.Dims(n=100, m=100, d=0, e=0)
    exact = hf.Plan.uniform(llama).cost(dims)
    assert exact.state == 2 * 2 * 100 * 16  # layers, groups, tokens, keys and values
    near = hf.Plan.uniform(llama, "window-sinks", before=9, sinks=1).cost(dims)
    assert near.state == 2 * 2 * 10 * 16 and near.flops < exact.flops
    mixed = hf.Plan.uniform(llama, unit="head").edit("window", units=[0, 1], before=9).cost(dims)
    assert mixed.state == 2 * (9 + 100) * 16


BROKEN = {
    "version": (lambda data: data | {"heedful_plan": 2}, "version 2"),
    "no plan": (lambda data: {"a": 1}, "heedful_plan"),
    "unknown field": (lambda data: data | {"heads": 3}, "unknown field 'heads'"),
    "missing field": (lambda data: {name: x for name, x in data.items() if name != "unit"}, "'unit' is missing"),
    "unit": (lambda data: data | {"unit": "token"}, "expected one of head, kv-group, layer"),
    "length": (lambda data: data | {"length": -1}, "number of tokens"),
    "mechanism": (lambda data: data | {"mechanisms": {"exact": {"name": "softmacs"}}}, "did you mean softmax"),
    "option": (
        lambda data: data | {"mechanisms": {"exact": {"name": "window", "options": {"size": 3}}}},
        "window has no option 'size'",
    ),
    "label": (lambda data: _with_units(data, ["exact", "far"]), "no mechanism is labelled 'far'"),
    "head out of range": (lambda data: _with_units(data, ["exact"] * 3), "3 units, expected 2"),
    "no count": (lambda data: data | {"layers": [data["layers"][0] | {"heads": "4"}]}, "expected counts"),
}


def _with_units(data, units):
    return data | {"layers": [data["layers"][0] | {"units": units}, *data["layers"][1:]]}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_explained(llama, fault, tmp_path):
    change, said = BROKEN[fault]
    (tmp_path / "plan.json").write_text(json.dumps(change(hf.Plan.uniform(llama).to_dict())))
    with pytest.raises(ValueError, match=said):
        hf.Plan.load(tmp_path / "plan.json")


def test_text_that_is_no_json_is_explained(tmp_path):
    (tmp_path / "plan.json").write_text('{"heedful_plan": 1')
    with pytest.raises(ValueError, match="no JSON"):
        hf.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 2}, "layers: 2 is out of range, there are 2 layers"),
        ({"units": [0, 7]}, "units: 7 is out of range, there are 2 units"),
    ],
)
def test_an_edit_out_of_range_is_explained(llama, change, said):
    with pytest.raises(ValueError, match=said):
        hf.Plan.uniform(llama).edit("softmax", **change)


REFUSED = {
    "another type": (lambda: (zoo.grow(SPECIES["gpt2"]), hf.Plan.uniform(zoo.grow(SPECIES["opt"]))), "of type opt"),
    "another shape": (
        lambda: (
            zoo.grow(SPECIES["llama"]),
            hf.Plan.from_dict(_narrower(hf.Plan.uniform(zoo.grow(SPECIES["llama"])).to_dict())),
        ),
        "16 wide",
    ),
    "later keys": (lambda: _uniform("llama", "next"), "sees later keys, and the layer is causal"),
    "softcap": (lambda: _uniform("gemma2", "linear"), "the layer has a softcap, which linear can't apply"),
    "sinks": (lambda: _uniform("gpt_oss", "linear"), "the layer has sinks"),
    "own window": (lambda: _uniform("mistral", "retention"), "a window of its own"),
    "position bias": (lambda: _uniform("t5", "linear"), "a position bias"),
    "needs a length": (lambda: _uniform("bert", "linformer"), "linformer needs length"),
}


def _uniform(name, mechanism):
    model = zoo.grow(SPECIES[name])
    return model, hf.Plan.uniform(model, mechanism)


def _narrower(data):
    return data | {"layers": [layer | {"width": 16} for layer in data["layers"]]}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_plan_that_does_not_fit_is_refused_and_the_model_left_as_it_was(fault):
    make, said = REFUSED[fault]
    model, plan = make()
    before = model.config._attn_implementation, list(model.state_dict()), len(model._forward_pre_hooks)
    with pytest.raises(ValueError, match=said):
        hf.attach(model, plan)
    assert before == (model.config._attn_implementation, list(model.state_dict()), len(model._forward_pre_hooks))
    assert getattr(model.config, "heedful", None) is None


def test_heads_that_are_differences_are_refused():
    import transformers

    config = transformers.DiffLlamaConfig(**zoo.LLAMA)
    with pytest.raises(hf.Refused, match="differences of two softmaxes"):
        hf.Plan.uniform(transformers.DiffLlamaForCausalLM(config))


@pytest.mark.parametrize("species", zoo.REFUSED, ids=lambda species: species.name)
def test_what_the_probe_refuses_can_not_be_attached(species):
    with pytest.raises(hf.Refused, match="computes its weights itself"):
        hf.Plan.uniform(zoo.grow(species))
