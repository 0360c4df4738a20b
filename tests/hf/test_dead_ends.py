"""Models and inputs at which a scan used to end in a traceback or in a refusal without need."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'heedful[hf]'")

import torch
import transformers
import zoo

import heedful.hf as hf
from heedful.hf import prose
from heedful.hf.modules import out_of_sight

SPECIES = {species.name: species for species in [*zoo.CAPTURED, *zoo.OTHERS]}
IMAGE = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 2, "num_channels": 1,
}  # fmt: skip


def spread(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 1.7 * weight.shape[-1] ** -0.5)
    return model.eval()


def matrices(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[hf.Probe, list[torch.Tensor]]:
    found: list[torch.Tensor] = []
    probe = hf.Probe(model)
    probe(inputs, lambda call: found.append(call.operator().to_dense()))
    return probe, found


def test_a_pooling_head_with_a_learned_query_is_left_out_and_the_rest_is_exact():
    torch.manual_seed(0)
    model = spread(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**IMAGE)))
    assert out_of_sight(model) == ["head.attention"]
    image = {"pixel_values": torch.randn(1, 1, 16, 16)}
    _, found = matrices(model, image)
    model.set_attn_implementation("eager")
    own = model(**image, output_attentions=True).attentions
    assert len(found) == len(own) == 2
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(found, own, strict=True))


def test_torchs_own_attention_inside_the_layers_is_still_refused():
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**IMAGE))
    model.encoder.layers[0].mlp = torch.nn.MultiheadAttention(32, 4)
    with pytest.raises(hf.Refused, match="MultiheadAttention"):
        hf.Probe(model)


def test_patches_that_are_left_out_at_random_are_the_same_in_every_run():
    torch.manual_seed(0)
    sizes = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4}
    config = transformers.ViTMAEConfig(**IMAGE, **sizes, decoder_intermediate_size=40)
    model = spread(transformers.ViTMAEForPreTraining(config))
    image = {"pixel_values": torch.randn(1, 1, 16, 16)}
    before = torch.get_rng_state()
    probe, one = matrices(model, image)
    _, two = matrices(model, image)
    assert probe.draws and torch.equal(before, torch.get_rng_state())
    assert [tuple(x.shape) for x in one] == [(1, 4, 17, 17)] * 2 + [(1, 4, 65, 65)]
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


def test_a_model_that_draws_nothing_is_not_said_to():
    model = zoo.grow(SPECIES["llama"])
    probe, _ = matrices(model, zoo.texts(SPECIES["llama"]))
    assert not probe.draws


def test_inputs_that_the_model_itself_fails_on_get_a_sentence():
    model = zoo.grow(SPECIES["vit"])
    with pytest.raises(hf.Refused, match=r"ViTModel by itself can't be run on input_ids: \w+: "):
        hf.Probe(model)({"input_ids": torch.ones(1, 9, dtype=torch.long)}, print)


def test_weights_that_hold_nan_are_named():
    model = zoo.grow(SPECIES["llama"])
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0] = torch.inf
    with pytest.raises(hf.CheckFailed, match=r"weights model\.layers\.1\.self_attn\.q_proj\.weight"):
        hf.Probe(model)(zoo.texts(SPECIES["llama"]), print)


@pytest.mark.parametrize(
    ("known", "start"),
    [
        ({"decoder_start_token_id": 7, "bos_token_id": 1, "pad_token_id": 0}, 7),
        ({"decoder_start_token_id": None, "bos_token_id": 1, "pad_token_id": 0}, 1),
        ({"decoder_start_token_id": None, "bos_token_id": None, "pad_token_id": 3}, 3),
    ],
)
def test_a_decoder_reads_the_first_start_token_that_is_known(known, start):
    model = zoo.grow(SPECIES["bart"])
    for name, value in known.items():
        setattr(model.config, name, value)
        setattr(model.generation_config, name, None)
    ids = torch.tensor([[5, 6, 8]])
    assert prose.with_decoder(model, {"input_ids": ids})["decoder_input_ids"].tolist() == [[start, 5, 6]]


def test_a_decoder_without_any_start_token_is_refused():
    model = zoo.grow(SPECIES["bart"])
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        setattr(model.config, name, None)
        setattr(model.generation_config, name, None)
    with pytest.raises(hf.Refused, match="has no decoder_start_token_id, bos_token_id or pad_token_id"):
        prose.with_decoder(model, {"input_ids": torch.tensor([[5, 6]])})
