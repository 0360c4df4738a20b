"""The probe: what it refuses, what its checks catch, and what it leaves behind."""

from __future__ import annotations

import importlib
import sys
import weakref
from dataclasses import replace
from math import inf

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'heedful[hf]'")

import torch
import transformers
import zoo
from transformers.models.llama import modeling_llama

import heedful as h
import heedful.hf as hf
from heedful.hf import checks, masks, tap
from heedful.hf.modules import attends_by_itself

SPECIES = {species.name: species for species in [*zoo.CAPTURED, *zoo.OTHERS, *zoo.REFUSED]}


def calls_of(model, inputs) -> list[hf.Call]:
    calls: list[hf.Call] = []
    hf.probe(model, inputs, calls.append)
    return calls


def state_of(model) -> tuple:
    modules = list(model.modules())
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in modules]
    return model.config._attn_implementation, [module.training for module in modules], hooks


# ---- what a call says


def test_a_call_is_an_operator_and_a_mechanism():
    call = calls_of(zoo.grow(SPECIES["llama"]), zoo.texts(SPECIES["llama"]))[0]
    assert call.name == "model.layers.0.self_attn"
    assert call.q.shape == (2, 4, 24, 8) and call.k.shape == (2, 2, 24, 8)
    a = call.operator()
    assert a.shape == (2, 4, 24, 24)
    assert isinstance(call.mechanism, h.Softmax)
    x = torch.randn(24, 3)
    torch.testing.assert_close(a @ x, a.to_dense() @ x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.mT @ x, a.to_dense().mT @ x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(call.forward(), a @ call.per_head(call.v), rtol=1e-4, atol=1e-5)


def test_query_heads_share_keys_in_order():
    call = calls_of(zoo.grow(SPECIES["llama"]), zoo.texts(SPECIES["llama"]))[0]
    shared = call.per_head(call.k)
    assert torch.equal(shared[:, 0], call.k[:, 0]) and torch.equal(shared[:, 1], call.k[:, 0])
    assert torch.equal(shared[:, 2], call.k[:, 1])


def test_layers_that_share_a_module_are_told_apart_by_turn():
    calls = calls_of(zoo.grow(SPECIES["albert"]), zoo.texts(SPECIES["albert"]))
    assert [call.turn for call in calls] == [0, 1]
    assert len({call.name for call in calls}) == 1


def test_real_queries_of_cross_attention_are_those_of_the_decoder():
    species = SPECIES["bart"]
    inputs = zoo.texts(species, "right")
    crossing = [call for call in calls_of(zoo.grow(species), inputs) if call.kind == "cross"]
    for call in crossing:
        assert torch.equal(call.real, inputs["decoder_attention_mask"].bool())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5", "modernbert"])
def test_half_precision_passes_the_checks(name):
    species = SPECIES[name]
    assert len(calls_of(zoo.grow(species, torch.bfloat16), zoo.texts(species, "right"))) == species.calls


def test_a_model_of_two_configurations_is_captured_in_both():
    """An encoder and a decoder with configurations of their own, inside a third."""
    small = {name: value for name, value in zoo.BERT.items()}
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**small), transformers.BertConfig(**small)
    )
    torch.manual_seed(0)
    model = transformers.EncoderDecoderModel(config=config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim == 2 else 1)
    inputs = {"input_ids": torch.randint(3, 60, (1, 9)), "decoder_input_ids": torch.randint(3, 60, (1, 9))}
    kinds = [call.kind for call in calls_of(model, inputs)]
    assert kinds == ["self", "self", "causal", "cross", "causal", "cross"]  # although n = m everywhere


def test_a_sink_applied_after_the_reported_weights_is_seen():
    """GraniteSWA reports weights that sum to one, and scales its outputs afterwards."""
    pytest.importorskip("transformers.models.granite_swa", reason="this transformers has no granite_swa")
    species = zoo.Species(
        "granite_swa", "GraniteSWAForCausalLM", "GraniteSWAConfig", {**zoo.LLAMA, "sliding_window": 7}
    )
    for call in calls_of(zoo.grow(species), zoo.texts(species)):
        sums = call.operator().to_dense().sum(-1)
        assert call.sink is not None and bool((sums < 0.999).any()) and bool((sums <= 1.00001).all())


@pytest.mark.parametrize("name", ["llama", "t5", "bart"])
@pytest.mark.usefixtures("annotations_enforced")
def test_annotations_hold(name):
    species = SPECIES[name]
    hf.probe(zoo.grow(species), zoo.texts(species, "left"), lambda call: (call.operator(), call.real, call.forward()))


class Wrapped(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, **inputs):
        return self.inner(**inputs)


def test_a_model_inside_another_module_is_captured():
    calls = calls_of(Wrapped(zoo.grow(SPECIES["llama"])), zoo.texts(SPECIES["llama"]))
    assert [call.name for call in calls] == ["inner.model.layers.0.self_attn", "inner.model.layers.1.self_attn"]


# ---- outputs that somebody else computes


class Elsewhere(hf.Attending):
    def __init__(self, factor=1.0):
        self.factor, self.asked = factor, []

    def attend(self, call):
        self.asked.append((call.at, call.q.shape[-2]))
        out, beside = checks.attended(call)
        return (out * self.factor, beside) if call.at == 1 else None


def test_whoever_attends_is_checked_once_and_asked_before_each_visit():
    species, seen = SPECIES["llama"], []
    probe, elsewhere = hf.Probe(zoo.grow(species), check_tokens=10), Elsewhere()
    for _ in range(2):
        probe(zoo.texts(species), lambda call: seen.append(elsewhere.asked[-1]), elsewhere)
    assert elsewhere.asked == [(0, 10), (1, 10)] + [(0, 24), (1, 24)] * 2
    assert seen == [(0, 24), (1, 24)] * 2


def test_outputs_from_elsewhere_go_into_the_model_and_wrong_ones_are_caught():
    species = SPECIES["llama"]
    probe = hf.Probe(zoo.grow(species))
    probe(zoo.texts(species), lambda call: None)  # heedful's own are no excuse for others
    with pytest.raises(hf.CheckFailed, match=r"layers\.1.*outputs in torch\.float32 differ"):
        probe(zoo.texts(species), lambda call: pytest.fail("was measured"), Elsewhere(1.001))
    probe(zoo.texts(species), lambda call: None, Elsewhere())
    with pytest.raises(hf.CheckFailed, match="outputs are not finite"):  # it is what the model is given, as ever
        probe(zoo.texts(species), lambda call: None, Elsewhere(inf))


def test_a_check_shows_the_calls_on_its_tokens():
    species, seen = SPECIES["llama"], []
    probe, inputs = hf.Probe(zoo.grow(species), check_tokens=10), zoo.texts(species)
    assert not probe.sees_all(inputs) and probe.sees_all({name: x[:, :10] for name, x in inputs.items()})
    probe.check(inputs, lambda call: seen.append((call.at, call.q.shape[-2])))
    assert seen == [(0, 10), (1, 10)]


# ---- memory


def test_one_call_is_alive_at_a_time():
    species = SPECIES["llama"]
    seen: list[weakref.ref] = []

    def visit(call):
        assert not [old for old in seen if old() is not None]
        seen.append(weakref.ref(call.q))

    hf.probe(zoo.grow(species), zoo.texts(species, "left"), visit)
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["mistral", "modernbert", "bart"])
def test_masks_of_padded_and_local_layers_are_never_made(name, monkeypatch):
    species = SPECIES[name]
    probe, inputs = hf.Probe(zoo.grow(species)), zoo.texts(species, "left")
    probe(inputs, lambda call: None)

    def forbidden(request):
        raise AssertionError("a dense mask")

    monkeypatch.setattr(masks.MaskRequest, "dense", forbidden)
    seen = []
    probe(inputs, seen.append)
    assert len(seen) == species.calls and all(call.bias is None for call in seen)


# ---- masks of one's own


def test_a_mask_that_no_pattern_describes_becomes_a_bias():
    species = SPECIES["llama"]
    model, inputs = zoo.grow(species), zoo.texts(species)
    torch.manual_seed(3)
    own = (torch.rand(2, 1, 24, 24) < 0.6) | torch.eye(24, dtype=torch.bool)
    additive = torch.zeros(own.shape).masked_fill_(~own, torch.finfo(torch.float32).min)
    for call in calls_of(model, {**inputs, "attention_mask": additive}):
        assert call.kind == "self" and torch.equal(call.bias == 0, own)
        assert not call.operator().to_dense()[~own.expand(-1, 4, -1, -1)].any()


def test_a_mask_of_ones_own_is_cut_with_the_text_for_the_check():
    species, seen = SPECIES["llama"], []
    own = torch.zeros(2, 1, 24, 24).masked_fill_(torch.ones(24, 24, dtype=torch.bool).triu(1), -1e9)
    inputs = {**zoo.texts(species), "attention_mask": own, "position_ids": torch.arange(24).expand(2, -1)}
    hf.Probe(zoo.grow(species), check_tokens=10)(inputs, lambda call: seen.append(call.kind))
    assert seen == ["causal", "causal"]


def test_packed_sequences_do_not_see_each_other():
    species = SPECIES["llama"]
    model, inputs = zoo.grow(species), zoo.texts(species)
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)
    for call in calls_of(model, {**inputs, "position_ids": positions}):
        weights = call.operator().to_dense()
        assert call.kind == "causal"
        assert not weights[..., 10:, :10].any() and weights[..., 9, :10].any()


def test_a_window_counts_tokens_that_are_masked_inside_a_text():
    """Transformers counts distances over holes in the mask; segments would not."""
    species = SPECIES["mistral"]
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 8:12] = 0
    assert len(calls_of(zoo.grow(species), {**zoo.texts(species), "attention_mask": mask})) == 2


# ---- what the checks catch


PLANTED = {
    "gemma2": {"softcap": None},
    "gpt_oss": {"sink": None},
    "t5": {"bias": None},
    "bert": {"segments": None},
    "mistral": {"pattern": h.Causal()},
    "modernbert": {"pattern": h.Full()},
    "llama": {"pattern": h.Full()},
    "qwen3": {"scale": 0.2},
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_part_that_is_forgotten_is_caught(name, monkeypatch):
    species = SPECIES[name]
    monkeypatch.setattr(tap, "Call", lambda **parts: hf.Call(**{**parts, **PLANTED[name]}))
    with pytest.raises(hf.CheckFailed, match="weights differ from the model's own"):
        hf.probe(zoo.grow(species), zoo.texts(species, "right"), lambda call: pytest.fail("was measured"))


def test_grouped_keys_in_the_wrong_order_are_caught(monkeypatch):
    monkeypatch.setattr(hf.Call, "per_head", lambda self, x: x.repeat(1, self.heads // x.shape[1], 1, 1))
    with pytest.raises(hf.CheckFailed, match="weights differ"):
        calls_of(zoo.grow(SPECIES["llama"]), zoo.texts(SPECIES["llama"]))


def test_scores_that_the_capture_does_not_know_of_are_caught(monkeypatch):
    plain = modeling_llama.eager_attention_forward

    def cooler(module, query, *args, **options):
        return plain(module, query * 1.01, *args, **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", cooler)
    with pytest.raises(hf.CheckFailed, match=r"weights differ from the model's own by 0\.0"):
        calls_of(zoo.grow(SPECIES["llama"]), zoo.texts(SPECIES["llama"]))


def test_a_mask_that_the_model_makes_for_eager_alone_is_caught(monkeypatch):
    """Without an entry in the mask interface a causal model would silently look both ways."""
    monkeypatch.delitem(transformers.AttentionMaskInterface._global_mapping, tap.NAME)
    with pytest.raises(hf.CheckFailed, match="differ from those of the untouched model"):
        calls_of(zoo.grow(SPECIES["llama"]), zoo.texts(SPECIES["llama"]))


def test_a_path_that_only_eager_takes_is_caught():
    model = zoo.grow(SPECIES["llama"])
    model.model.norm.register_forward_hook(
        lambda module, args, out: out if model.config._attn_implementation == "eager" else out * 1.001
    )
    with pytest.raises(hf.CheckFailed, match="differ from those of the untouched model"):
        calls_of(model, zoo.texts(SPECIES["llama"]))


def test_a_module_that_runs_without_a_call_is_caught(monkeypatch):
    model = zoo.grow(SPECIES["llama"])
    monkeypatch.setattr(model.model.layers[1].self_attn, "forward", lambda hidden_states, **rest: (hidden_states, None))
    with pytest.raises(hf.CheckFailed, match=r"1 attention modules ran without a call .* model\.layers\.1\.self_attn"):
        calls_of(model, zoo.texts(SPECIES["llama"]))


def test_a_leak_from_the_future_is_caught():
    call = calls_of(zoo.grow(SPECIES["llama"]), zoo.texts(SPECIES["llama"]))[0]
    checks.check_call(call, *checks.attended(call))
    leaking = replace(call, pattern=h.Full())
    with pytest.raises(hf.CheckFailed, match="sees a later key"):
        checks.check_call(leaking, *checks.attended(leaking))


@pytest.mark.parametrize("name", ["llama", "t5", "gpt_oss", "gemma2"])
def test_columns_beside_the_values_change_no_output(name):
    species = SPECIES[name]
    for call in calls_of(zoo.grow(species), zoo.texts(species)):
        out, products = checks.attended(call)
        torch.testing.assert_close(out, call.forward(), rtol=1e-5, atol=1e-6)
        m = call.k.shape[-2]
        columns = torch.stack([torch.ones(m), (torch.arange(m) > m // 2).float()], -1)
        torch.testing.assert_close(products, call.operator() @ columns, rtol=1e-5, atol=1e-6)


def test_a_module_without_a_call_is_caught_by_a_run_that_ends_early(monkeypatch):
    species = SPECIES["llama"]
    model, seen = zoo.grow(species), []
    probe = hf.Probe(model)
    probe(zoo.texts(species), seen.append)
    monkeypatch.setattr(model.model.layers[0].self_attn, "forward", lambda hidden_states, **rest: (hidden_states, None))

    def enough(call):
        raise hf.Enough

    with pytest.raises(hf.CheckFailed, match=r"1 attention modules ran without a call .* model\.layers\.0\.self_attn"):
        probe(zoo.texts(species), enough)


def test_rows_that_do_not_sum_to_one_are_caught():
    call = calls_of(zoo.grow(SPECIES["llama"]), zoo.texts(SPECIES["llama"]))[0]
    losing = replace(call, sink=torch.zeros(4))
    with pytest.raises(hf.CheckFailed, match="a row sums to"):
        # The sink takes part of the mass, and then the call says that it has none.
        checks.check_call(_Pretending(losing), *checks.attended(losing))
    checks.check_call(losing, *checks.attended(losing))
    blind = replace(call, bias=torch.full((1, 1, 24, 24), -inf))
    with pytest.raises(hf.CheckFailed, match="a row sums to 0"):
        checks.check_call(blind, *checks.attended(blind))


class _Pretending:
    def __init__(self, call):
        self._call = call
        self.sink = None

    def __getattr__(self, name):
        return getattr(self._call, name)


def test_a_model_that_gives_nan_is_refused():
    model = zoo.grow(SPECIES["llama"])
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(hf.CheckFailed, match="untouched model's own outputs hold NaN"):
        calls_of(model, zoo.texts(SPECIES["llama"]))


# ---- what is refused


def test_a_module_of_attention_by_itself_is_refused_wherever_it_hides():
    model = zoo.grow(SPECIES["llama"])
    model.model.layers[0].extra = torch.nn.MultiheadAttention(8, 2)
    with pytest.raises(hf.Refused, match="MultiheadAttention"):
        hf.Probe(model)


@pytest.mark.parametrize("name", ["wavlm.WavLMAttention", "mra.MraSelfAttention", "yoso.YosoSelfAttention"])
def test_modules_that_attend_by_functions_of_their_own_are_seen(name):
    """Inside an encoder–decoder the other half would be measured, and nothing said of these."""
    folder, _, kind = name.partition(".")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    assert attends_by_itself(getattr(module, kind))


def test_a_compiled_model_is_refused():
    assert "was compiled" in hf.objections(torch.compile(zoo.grow(SPECIES["llama"])))[0]


def test_a_model_without_attention_is_refused():
    config = transformers.MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, state_size=4)
    assert "no module that attends" in hf.objections(transformers.MambaModel(config))[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"past_key_values": object()}, "not on top of a cache"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "empty text"),
        ({"attention_mask": torch.tensor([[1] * 24, [0] * 24])}, "row 1 is all padding"),
    ],
)
def test_inputs_that_make_no_sense_are_refused(change, words):
    species = SPECIES["llama"]
    with pytest.raises(hf.Refused, match=words):
        calls_of(zoo.grow(species), {**zoo.texts(species), **change})


def test_a_visitor_can_not_run_the_model_it_visits():
    species = SPECIES["llama"]
    model, inputs = zoo.grow(species), zoo.texts(species)
    probe = hf.Probe(model)
    with pytest.raises(RuntimeError, match="already being probed"):
        probe(inputs, lambda call: probe(inputs, lambda inner: None))


# ---- what is left behind


@pytest.mark.parametrize("name", ["llama", "bart", "vit"])
def test_the_model_is_left_as_it_was(name):
    species = SPECIES[name]
    model = zoo.grow(species)
    model.train()
    next(iter(model.children())).eval()
    inputs = zoo.texts(species)
    before, weights = state_of(model), {key: x.clone() for key, x in model.state_dict().items()}

    def break_off(call):
        raise KeyError("from the visitor")

    hf.probe(model, inputs, lambda call: None)
    assert state_of(model) == before
    with pytest.raises(KeyError, match="from the visitor"):
        hf.probe(model, inputs, break_off)
    assert state_of(model) == before
    assert all(torch.equal(x, weights[key]) for key, x in model.state_dict().items())
    assert not tap._taps


def test_a_visitor_that_has_enough_ends_the_run():
    species = SPECIES["llama"]
    model, seen = zoo.grow(species), []
    before = state_of(model)

    def first(call):
        seen.append(call.name)
        raise hf.Enough

    hf.probe(model, zoo.texts(species), first)
    assert seen == ["model.layers.0.self_attn"] and state_of(model) == before


def test_gradients_in_the_values_are_allowed():
    """The adjoint of a mechanism without a cheaper form is a gradient; inference mode would forbid it."""
    species = SPECIES["llama"]

    def visit(call):
        linear = h.Linear().operator(call.q, call.per_head(call.k))
        assert (linear.mT @ torch.ones(24, 1)).shape == (2, 4, 24, 1)

    hf.probe(zoo.grow(species), zoo.texts(species), visit)


def test_long_inputs_are_checked_on_few_tokens(monkeypatch):
    species = SPECIES["llama"]
    compared, seen = [], []
    plain = checks.compare_call

    def compare(call, own, out):
        compared.append(call.q.shape[-2])
        plain(call, own, out)

    monkeypatch.setattr(sys.modules["heedful.hf.probe"], "compare_call", compare)
    probe = hf.Probe(zoo.grow(species), check_tokens=10)
    for side in ("", "left", "left"):
        probe(zoo.texts(species, side), lambda call: seen.append(call.q.shape[-2]))
    assert compared == [10] * 4, "two layers, once for each form of input"
    assert seen == [24] * 6
