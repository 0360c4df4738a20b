"""Attached models: exact without a plan, one call for each mechanism, and everything back as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'heedful[hf]'")

import oracle
import torch
import zoo
from torch._dynamo.utils import counters

import heedful as h
import heedful.hf as hf
from heedful.hf.modules import attention_modules
from heedful.mechanisms.softmax import Softmax

ALL = [*zoo.CAPTURED, *zoo.OTHERS, *zoo.ITEMS]
SPECIES = {species.name: species for species in ALL}
PADDINGS = ("", "left", "right")
SEEING = ("vit", "swin", "patchtst")


def output(model, inputs):
    with torch.no_grad():
        out = model(**inputs)
    return out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state


def on_text(x, inputs):
    """Rows of text alone."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return x if mask is None else x[mask.bool()]


def two_kinds(model):
    """Every other unit by another mechanism."""
    plan = hf.Plan.uniform(model, unit="head")
    for at, own in enumerate(plan.layers):
        causal = own.layer.kind == "causal"
        options = {"before": 3} if causal else {"before": 3, "after": 3}
        plan = plan.edit("window", layers=at, units=range(0, own.layer.heads, 2), **options)
    return plan


@pytest.mark.parametrize("species", ALL, ids=lambda species: species.name)
def test_without_a_plan_it_is_exact_attention(species):
    model = zoo.grow(species)
    for padding in PADDINGS[: 1 if species.name in SEEING else 3]:
        inputs = zoo.texts(species, padding)
        model.set_attn_implementation("eager")
        expected = output(model, inputs)
        model.set_attn_implementation("heedful")
        torch.testing.assert_close(
            on_text(output(model, inputs), inputs), on_text(expected, inputs), rtol=1e-5, atol=3e-5
        )


@pytest.mark.parametrize("species", ALL, ids=lambda species: species.name)
def test_a_plan_runs_its_mechanisms_and_detach_gives_the_model_back(species):
    model = zoo.grow(species)
    inputs = zoo.texts(species, "" if species.name in SEEING else "left")
    before, weights = output(model, inputs), {name: x.clone() for name, x in model.state_dict().items()}
    implementation = model.config._attn_implementation
    hf.attach(model, two_kinds(model))
    found = output(model, inputs)
    with oracle.defined():
        expected = output(model, inputs)
    torch.testing.assert_close(on_text(found, inputs), on_text(expected, inputs), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(on_text(found, inputs), on_text(before, inputs), atol=1e-3)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in weights.items())
    hf.detach(model)
    assert torch.equal(output(model, inputs), before)
    assert list(model.state_dict()) == list(weights) and model.config._attn_implementation == implementation
    assert not hasattr(model.config, "heedful") and not model._forward_pre_hooks


def test_heads_that_are_no_neighbours_run_in_one_call(monkeypatch):
    model = zoo.grow(SPECIES["llama"])
    plan = hf.Plan.uniform(model, unit="head").edit("window", units=[0, 3], before=3)
    hf.attach(model, plan)
    calls, forward = [], Softmax.forward

    def counted(self, q, k, v, *, segments=None):
        calls.append((self.pattern, q.shape[1]))
        return forward(self, q, k, v, segments=segments)

    monkeypatch.setattr(Softmax, "forward", counted)
    output(model, zoo.texts(SPECIES["llama"]))
    assert len(calls) == 4 and calls[:2] == calls[2:]  # two layers, two mechanisms
    assert calls[:2] == [(h.Window(3), 2), (h.Causal(), 2)]


def test_no_mask_is_ever_dense(monkeypatch):
    from heedful.hf import masks

    model, inputs = zoo.grow(SPECIES["mistral"]), zoo.texts(SPECIES["mistral"], "left")
    hf.attach(model, two_kinds(model))
    monkeypatch.setattr(masks, "eager_mask", None)
    monkeypatch.setattr(masks.MaskRequest, "allowed", None)  # nor is a predicate asked row by row
    output(model, inputs)
    model.generate(**inputs, max_new_tokens=3)


def test_packed_texts_are_those_texts():
    model = zoo.grow(SPECIES["llama"])
    hf.attach(model, two_kinds(model).edit("linear", layers=1, units=1))
    ids = torch.randint(3, zoo.VOCABULARY, (1, 20))
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    packed = output(model, {"input_ids": ids, "position_ids": positions, "use_cache": False})
    apart = torch.cat([oracle.logits(model, ids[:, :8]), oracle.logits(model, ids[:, 8:])], 1)
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-4)


def test_a_mask_of_ones_own_is_exact_or_refused():
    model, ids = zoo.grow(SPECIES["llama"]), torch.randint(3, zoo.VOCABULARY, (1, 12))
    mask = torch.ones(12, 12).tril()
    mask[8, 3] = 0
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.where(mask > 0, 0.0, -torch.inf)[None, None],
        "use_cache": False,
    }
    model.set_attn_implementation("eager")
    expected = output(model, inputs)
    model.set_attn_implementation("heedful")
    torch.testing.assert_close(output(model, inputs), expected, rtol=1e-5, atol=1e-5)
    hf.attach(model, hf.Plan.uniform(model, "linear"))
    with pytest.raises(hf.Refused, match="bias"):
        output(model, inputs)


def test_dropout_is_refused():
    model = zoo.grow(SPECIES["bert"]).train()
    model.set_attn_implementation("heedful")
    with pytest.raises(hf.Refused, match="drops no weights"):
        model(**zoo.texts(SPECIES["bert"]))


# ---- training


def test_gradients_are_those_of_eager_and_of_checkpoints():
    model, inputs = zoo.grow(SPECIES["llama"]).train(), zoo.texts(SPECIES["llama"], "right")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)

    def gradients():
        model.zero_grad()
        model(**inputs, labels=labels, use_cache=False).loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    model.set_attn_implementation("eager")
    expected = gradients()
    model.set_attn_implementation("heedful")
    torch.testing.assert_close(gradients(), expected, rtol=1e-4, atol=1e-5)
    hf.attach(model, two_kinds(model).edit("linear", units=1))
    plain = gradients()
    with oracle.defined():
        torch.testing.assert_close(plain, gradients(), rtol=1e-3, atol=1e-5)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradients(), plain, rtol=1e-5, atol=1e-6)


def test_a_trainer_trains_and_what_mechanisms_learn_is_saved(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = zoo.grow(SPECIES["llama"])
    hf.attach(model, hf.Plan.uniform(model).edit("hedgehog", layers=0, units=1).edit("window", layers=1, before=4))
    learned = [name for name, _ in model.named_parameters() if ".heedful." in name]
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    ids = torch.randint(3, zoo.VOCABULARY, (8, 16))
    options = transformers.TrainingArguments(
        str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        learning_rate=1e-2, save_strategy="no", disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in ids]
    transformers.Trainer(model, options, train_dataset=data).train()
    assert learned and all(not torch.equal(before[name], model.get_parameter(name)) for name in learned)

    model.eval().save_pretrained(tmp_path / "saved")
    again, _ = hf.load(tmp_path / "saved")
    assert again.config._attn_implementation == "heedful" and again.config.heedful == model.config.heedful
    torch.testing.assert_close(oracle.logits(again, ids), oracle.logits(model, ids), rtol=1e-5, atol=1e-5)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    exact = hf.detach(model)
    exact.set_attn_implementation("eager")
    torch.testing.assert_close(output(plain.eval(), {"input_ids": ids}), output(exact, {"input_ids": ids}))


def test_a_configuration_with_a_plan_runs_it(tmp_path):
    import transformers

    model, inputs = zoo.grow(SPECIES["llama"]), zoo.texts(SPECIES["llama"])
    hf.attach(model, two_kinds(model)).save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="heedful").eval()
    torch.testing.assert_close(output(again, inputs), output(model, inputs))


@pytest.mark.parametrize("first", ["attach", "adapter"])
def test_adapters_come_before_or_after(first):
    peft = pytest.importorskip("peft")
    model, inputs = zoo.grow(SPECIES["llama"]), zoo.texts(SPECIES["llama"], "left")
    model.generation_config.eos_token_id = None
    plan = two_kinds(model)
    torch.manual_seed(0)
    options = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    if first == "attach":
        hf.attach(model, plan)
    adapted = peft.get_peft_model(model, options)
    if first == "adapter":
        hf.attach(adapted, plan)
    found = adapted.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, oracle.greedy(adapted, inputs, 5)[0])
    adapted.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    learned = [weight for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert learned and all(weight.grad is not None for weight in learned)
    hf.detach(adapted)
    assert all(getattr(module, "heedful", None) is None for module in attention_modules(model).values())


def test_compiled_models_agree_and_do_not_recompile_without_end():
    species = replace(SPECIES["llama"], options=zoo.LLAMA | {"num_hidden_layers": 1})
    model, inputs = zoo.grow(species), zoo.texts(species, "left", n=16)
    hf.attach(model, two_kinds(model))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = oracle.logits(model, ids, mask)
    torch.compiler.reset()
    counters.clear()
    compiled, cache = torch.compile(model, backend="eager"), hf.cache(model)
    with torch.no_grad(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        steps = [slice(0, 6), *(slice(at, at + 1) for at in range(6, 16))]  # more than recompiles are allowed
        found = [
            compiled(
                input_ids=ids[:, part], attention_mask=mask[:, : part.stop], position_ids=positions[:, part],
                past_key_values=cache, use_cache=True,
            ).logits
            for part in steps
        ]  # fmt: skip
    torch.testing.assert_close(torch.cat(found, 1)[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
    torch.compiler.reset()
