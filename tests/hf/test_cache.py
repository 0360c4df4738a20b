"""The cache of attached models, against recomputation by `matrix`: same tokens, logits within 1e-4."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'heedful[hf]'")

import oracle
import torch
import transformers
import zoo

import heedful as h
import heedful.hf as hf
from heedful.hf.stores import FullStore, RingStore

SPECIES = {species.name: species for species in [*zoo.CAPTURED, *zoo.OTHERS]}
SOME = {
    "exact": lambda plan: plan,
    "groups": lambda plan: plan.edit("window-sinks", units=1, before=5, sinks=2),
    "heads": lambda plan: plan.edit("window", units=[0, 3], before=4).edit("window-sinks", units=1, before=6, sinks=2),
    "states": lambda plan: plan.edit("linear", units=0).edit("window-sinks", units=1, before=5, sinks=2),
}


def attached(name="llama", kind="groups", dtype=torch.float32):
    model = zoo.grow(SPECIES[name], dtype)
    model.generation_config.eos_token_id = None
    plan = hf.Plan.uniform(model, unit="head" if kind == "heads" else "kv-group")
    return hf.attach(model, SOME[kind](plan))


def near(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def run(model, inputs, spans, cache):
    """Logits of a text in chunks."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = []
    for start, stop in spans:
        with torch.no_grad():
            out = model(
                input_ids=ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
                use_cache=True,
            )
        found.append(out.logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("padding", ["", "left"])
@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("name", ["llama", "gpt2"])  # grouped keys, and one for each head
def test_greedy_tokens_and_logits_are_those_of_recomputation(name, kind, padding):
    model, inputs = attached(name, kind), zoo.texts(SPECIES[name], padding)
    ids, expected = oracle.greedy(model, inputs, 9)
    out = model.generate(**inputs, max_new_tokens=9, do_sample=False, return_dict_in_generate=True, output_logits=True)
    assert isinstance(out.past_key_values, hf.HeedfulCache)
    assert torch.equal(out.sequences, ids)
    near(torch.stack(out.logits, 1), expected)


@pytest.mark.parametrize("kind", ["exact", "groups", "heads"])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_windows_caps_sinks_and_states_of_the_model_stay(name, kind):
    model, inputs = attached(name, kind), zoo.texts(SPECIES[name], "left")
    ids, _ = oracle.greedy(model, inputs, 9)
    assert torch.equal(model.generate(**inputs, max_new_tokens=9, do_sample=False), ids)


@pytest.mark.parametrize(
    "mechanism", ["retention", "favor+", "lowrank-sparse", "left", "relu2", "blocks", "sparse-fixed"]
)
def test_every_mechanism_that_streams_can_generate(mechanism):
    model, inputs = zoo.grow(SPECIES["llama"]), zoo.texts(SPECIES["llama"], "left")
    model.generation_config.eos_token_id = None
    options = {name: x for name, x in h.CATALOG[mechanism].small.items() if name != "seed"}
    hf.attach(model, hf.Plan.uniform(model, mechanism, **options).edit("softmax", layers=1, units=0))
    ids, _ = oracle.greedy(model, inputs, 5)
    assert torch.equal(model.generate(**inputs, max_new_tokens=5, do_sample=False), ids)


@pytest.mark.parametrize("kind", SOME)
def test_samples_and_beams_are_those_of_recomputation(kind):
    model, inputs = attached(kind=kind), zoo.texts(SPECIES["llama"], "left")
    for options in ({"num_beams": 3, "do_sample": False}, {"do_sample": True, "num_return_sequences": 2}):
        torch.manual_seed(0)
        found = model.generate(**inputs, max_new_tokens=7, **options)
        torch.manual_seed(0)
        with oracle.defined():
            expected = model.generate(**inputs, max_new_tokens=7, use_cache=False, **options)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("kind", SOME)
def test_chunks_see_keys_that_they_overwrite(kind, padding):
    model, inputs = attached(kind=kind), zoo.texts(SPECIES["llama"], padding, n=36)
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    spans = [(0, 7), (7, 8), (8, 20), (20, 23), (23, 24), (24, 36)]
    found, expected = run(model, inputs, spans, hf.cache(model)), oracle.logits(model, ids, mask)
    near(found[mask.bool()], expected[mask.bool()])


def test_padding_between_tokens_is_remembered():
    model = attached(kind="heads")
    ids, mask = torch.randint(3, zoo.VOCABULARY, (2, 30)), torch.ones(2, 30, dtype=torch.long)
    mask[0, 9:14] = mask[1, 20] = mask[0, 26:28] = 0
    inputs, spans = (
        {"input_ids": ids, "attention_mask": mask},
        [(0, 12), (12, 16), *((at, at + 1) for at in range(16, 30))],
    )
    near(run(model, inputs, spans, hf.cache(model))[mask.bool()], oracle.logits(model, ids, mask)[mask.bool()])


@pytest.mark.parametrize("kind", SOME)
def test_padding_that_the_host_learns_a_step_late_is_exact(kind, monkeypatch):
    """On a GPU a step does not wait for its mask; here the same on a CPU."""
    monkeypatch.setattr(hf.HeedfulCache, "_reads_late", staticmethod(lambda mask: True))
    model = attached(kind=kind)
    ids, mask = torch.randint(3, zoo.VOCABULARY, (2, 30)), torch.ones(2, 30, dtype=torch.long)
    mask[0, 16] = mask[1, 22:24] = 0
    inputs, spans = {"input_ids": ids, "attention_mask": mask}, [(0, 12), *((at, at + 1) for at in range(12, 30))]
    near(run(model, inputs, spans, hf.cache(model))[mask.bool()], oracle.logits(model, ids, mask)[mask.bool()])


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "opt", "gpt_neox", "phi"])
def test_other_decoders_generate(name):
    model, inputs = attached(name, "heads"), zoo.texts(SPECIES[name], "left")
    ids, _ = oracle.greedy(model, inputs, 5)
    assert torch.equal(model.generate(**inputs, max_new_tokens=5, do_sample=False), ids)


def test_whisper_generates():
    model = zoo.grow(SPECIES["whisper"])
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    hf.attach(model, hf.Plan.uniform(model).edit("window", layers=[2, 3], units=[0, 2], before=3))
    sound = {"input_features": zoo.texts(SPECIES["whisper"])["input_features"]}
    found = model.generate(**sound, max_new_tokens=8, do_sample=False)
    with oracle.defined():
        assert torch.equal(found, model.generate(**sound, max_new_tokens=8, do_sample=False, use_cache=False))


def test_generate_prefills_in_chunks():
    model, inputs = attached(), zoo.texts(SPECIES["llama"], "left")
    found = model.generate(**inputs, max_new_tokens=6, do_sample=False, prefill_chunk_size=5)
    assert torch.equal(found, oracle.greedy(model, inputs, 6)[0])


@pytest.mark.parametrize("kind", SOME)
def test_a_cache_serves_several_turns(kind):
    model = attached(kind=kind)
    cache = hf.cache(model, max_length=48)
    ids = zoo.texts(SPECIES["llama"])["input_ids"]
    for more in (0, 5):
        ids = torch.cat([ids, torch.randint(3, zoo.VOCABULARY, (2, more))], 1)
        expected, _ = oracle.greedy(model, {"input_ids": ids}, 5)
        ids = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, past_key_values=cache)
        assert torch.equal(ids, expected)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.bytes() == 0


@pytest.mark.parametrize("padding", ["", "left"])
@pytest.mark.parametrize("kind", SOME)
def test_tokens_can_be_taken_back(kind, padding):
    model, inputs = attached(kind=kind), zoo.texts(SPECIES["llama"], padding, n=36)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    cache = hf.cache(model)
    cache.activate_past_recording()
    run(model, inputs, [(0, 18)], cache)
    cache.crop(0)
    run(model, inputs, [(18, 27)], cache)
    cache.crop(-6)
    found = [run(model, inputs, [(21, 22)], cache)]
    run(model, inputs, [(22, 23), (23, 24)], cache)
    cache.crop(-2)
    found.append(run(model, inputs, [(22, 36)], cache))
    near(torch.cat(found, 1), oracle.logits(model, inputs["input_ids"], mask)[:, 21:])


def test_a_crop_that_would_be_wrong_is_refused():
    model = attached()
    cache = hf.cache(model)
    run(model, zoo.texts(SPECIES["llama"]), [(0, 20), (20, 21), (21, 22)], cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)


@pytest.mark.parametrize("kind", SOME)
def test_assisted_decoding(kind):
    model = attached(kind=kind)
    ids = zoo.texts(SPECIES["llama"], batch=1)["input_ids"]
    ids = torch.cat([ids, ids[:, -9:], ids[:, -9:]], 1)
    other = zoo.grow(SPECIES["llama"])  # the same weights, every head exact: it is often right
    other.generation_config.eos_token_id = None
    expected, _ = oracle.greedy(model, {"input_ids": ids}, 8)
    for options in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": other}):
        assert torch.equal(model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, **options), expected)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("kind", ["exact", "groups"])
def test_a_static_cache_is_exact_or_refused(name, kind):
    model, inputs = attached(name, kind), zoo.texts(SPECIES[name], "left")
    options = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    if (name, kind) == ("mistral", "groups"):  # its own window drops the first tokens, which the plan counts from
        with pytest.raises(hf.Refused, match="dropped by a cache of the layer's own window"):
            model.generate(**inputs, **options)
    else:
        assert torch.equal(model.generate(**inputs, **options), oracle.greedy(model, inputs, 9)[0])


def test_a_quantised_cache_is_used_as_it_is():
    model, inputs = attached(), zoo.texts(SPECIES["llama"], "left")
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "quantized"}
    found = [model.generate(**inputs, **options, cache_config={"backend": "fp8"}) for _ in range(2)]
    hf.detach(model)
    assert torch.equal(*found) and found[0].shape == (2, 28)


def test_a_paged_cache_is_refused():
    model = attached()
    attend = transformers.AttentionInterface()["heedful"]
    q = torch.randn(1, 4, 3, 8)
    with pytest.raises(hf.Refused, match="paged"):
        attend(model.model.layers[0].self_attn, q, q[:, :2], q[:, :2], None, cache=object())


@pytest.mark.parametrize("kind", SOME)
def test_bfloat16_errs_no_more_than_recomputation(kind):
    model, inputs = attached(kind=kind, dtype=torch.bfloat16), zoo.texts(SPECIES["llama"], "left")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    found = run(model, inputs, [(0, 10), *((at, at + 1) for at in range(10, 24))], hf.cache(model))
    exact = oracle.logits(model.float(), ids, mask)
    errors = [float((x.float() - exact)[mask.bool()].square().mean().sqrt()) for x in (found, whole)]
    assert errors[0] < 1.25 * errors[1]


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
@pytest.mark.parametrize("swapped", [False, True])
def test_encoder_decoder_models_generate(name, swapped):
    model = zoo.grow(SPECIES[name])
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    plan = hf.Plan.uniform(model)
    if swapped:
        plan = plan.edit("window", layers=[2, 3], units=[0, 2], before=3).edit("window", layers=0, before=3, after=3)
    hf.attach(model, plan)
    inputs = {key: x for key, x in zoo.texts(SPECIES[name], "right").items() if not key.startswith("decoder")}
    for beams in (1, 2):
        options = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False, "return_dict_in_generate": True}
        found = model.generate(**inputs, **options, output_logits=True)
        assert isinstance(found.past_key_values.self_attention_cache, hf.HeedfulCache)
        with oracle.defined():
            expected = model.generate(**inputs, **options, output_logits=True, use_cache=False)
        assert torch.equal(found.sequences, expected.sequences)
        near(torch.stack(found.logits), torch.stack(expected.logits))


# ---- what is kept


def test_each_group_keeps_what_its_heads_need():
    model = attached(kind="heads")
    cache = hf.cache(model, max_length=40)
    run(model, zoo.texts(SPECIES["llama"], n=30), [(0, 30)], cache)
    stores = cache.layers[0].keys_of
    assert [(type(store), store.groups) for store in stores] == [(RingStore, (0,)), (FullStore, (1,))]
    assert stores[0].k.shape == (2, 1, 9, 8) and stores[1].k.shape == (2, 1, 40, 8)


@pytest.mark.parametrize("kind", ["exact", "groups"])
def test_bytes_are_those_of_the_plan(kind):
    model = zoo.grow(SPECIES["llama"])
    plan = hf.Plan.uniform(model)
    plan = plan if kind == "exact" else plan.edit("window-sinks", units=1, before=63, sinks=4)
    hf.attach(model, plan)
    cache, ids = hf.cache(model, max_length=500), torch.randint(3, zoo.VOCABULARY, (2, 500))
    run(model, {"input_ids": ids}, [(0, 499), (499, 500)], cache)
    expected = plan.cost(h.Dims(1, 500, 0, 0, batch=2)).state * 4
    assert abs(cache.bytes() / expected - 1) < 0.02


def test_a_step_copies_nothing_and_reads_nothing(monkeypatch):
    model = attached()
    cache = hf.cache(model, max_length=40)
    run(model, zoo.texts(SPECIES["llama"], n=30), [(0, 29)], cache)
    before = [(store.k.data_ptr(), store.v.data_ptr()) for layer in cache.layers for store in layer.keys_of]
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 1, 8)
    module = model.model.layers[0].self_attn
    cache.layers[0].update(k, k)

    join = torch.cat

    def refused(*args, **kwargs):
        raise AssertionError("a step read a number on the host")

    def outputs_alone(tensors, axis):
        assert all(x.shape[-2] == 1 for x in tensors), "a step concatenated keys"
        return join(tensors, axis)

    monkeypatch.setattr(torch, "cat", outputs_alone)
    for name in ("item", "__bool__", "__int__", "tolist", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    out, _ = transformers.AttentionInterface()["heedful"](module, q, k, k, None, scaling=8**-0.5)
    monkeypatch.undo()
    assert out.shape == (2, 1, 4, 8)
    assert before == [(store.k.data_ptr(), store.v.data_ptr()) for layer in cache.layers for store in layer.keys_of]


# ---- what is refused


def test_lengths_beyond_the_buffer_are_refused():
    model = attached()
    with pytest.raises(ValueError, match="25 tokens, and the cache was made for 24"):
        model.generate(**zoo.texts(SPECIES["llama"]), max_new_tokens=4, past_key_values=hf.cache(model, max_length=24))


class Still(h.Mechanism):
    """Causal softmax without a recurrence."""

    def __init__(self):
        super().__init__(h.Causal())

    def matrix(self, q, k, *, segments=None):
        return h.Softmax().matrix(q, k, segments=segments)

    def forward(self, q, k, v, *, segments=None):
        return h.Softmax()(q, k, v, segments=segments)

    def cost(self, dims):
        return h.Cost(0, 0)


def test_a_mechanism_that_can_not_stream_is_refused_for_generate_alone(monkeypatch):
    entry = replace(h.CATALOG["softmax"], name="still", build=Still)
    monkeypatch.setitem(h.CATALOG, "still", entry)
    model, inputs = zoo.grow(SPECIES["llama"]), zoo.texts(SPECIES["llama"])
    model.generation_config.eos_token_id = None
    hf.attach(model, hf.Plan.uniform(model, "still"))
    with pytest.raises(hf.Refused, match="can't go token by token"):
        model.generate(**inputs, max_new_tokens=2)
    expected, _ = oracle.greedy(model, inputs, 3)
    assert torch.equal(model.generate(**inputs, max_new_tokens=3, do_sample=False, use_cache=False), expected)


def test_a_model_that_does_not_attend_by_heedful_gets_no_cache():
    model = attached()
    cache = hf.cache(model)
    hf.detach(model)
    with pytest.raises(hf.Refused, match="attach"):
        hf.cache(model)
    with pytest.raises(RuntimeError, match="nobody attended"):
        run(model, zoo.texts(SPECIES["llama"]), [(0, 5), (5, 6)], cache)


def test_an_encoder_has_no_cache():
    model = zoo.grow(SPECIES["bert"])
    hf.attach(model, hf.Plan.uniform(model))
    with pytest.raises(hf.Refused, match="no causal layer"):
        hf.cache(model)


def test_smollm2_generates_what_recomputation_gives():
    try:
        model, tokenizer = hf.load("smollm2")
    except hf.Refused as why:
        pytest.skip(f"needs smollm2: {why}")
    plan = hf.Plan.uniform(model).edit("window-sinks", layers=range(5, 30), units=[0, 2], before=31, sinks=4)
    hf.attach(model, plan)
    inputs = dict(hf.encode(model, tokenizer, hf.passages()[0], 64))
    ids, expected = oracle.greedy(model, inputs, 4)
    out = model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(out.sequences, ids)
    near(torch.stack(out.logits, 1), expected)


def test_keys_that_a_failed_forward_pass_left_behind_are_forgotten():
    """They have as many tokens as the next model's: without a look at whose they are, it would attend to them."""
    model, inputs = attached(), zoo.texts(SPECIES["llama"], "")
    expected = model(**inputs, use_cache=False).logits
    keys = torch.zeros(*inputs["input_ids"].shape[:1], 2, inputs["input_ids"].shape[1], 8)
    hf.cache(model).layers[0].update(keys, keys)  # an attention module that raised after this
    near(model(**inputs, use_cache=False).logits, expected)
    other = attached()
    hf.cache(model).layers[0].update(keys, keys)
    hf.detach(other)
    other.set_attn_implementation("heedful")  # no plan, and no hook
    near(other(**inputs, use_cache=False).logits, zoo.grow(SPECIES["llama"], torch.float32)(**inputs).logits)
