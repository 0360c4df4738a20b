"""Tiny random models of the architectures that docs/models.md speaks of.

Weights of a freshly initialised model give logits near zero, and then every mask, scale and bias looks right: matrices
are drawn here so that logits spread over several units.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

VOCABULARY = 61
SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
BERT = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT = {**SMALL, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
BART = {
    **SMALL,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Species:
    """One architecture: how to make a small one, and the kinds of attention that are to be seen in it."""

    name: str
    model: str
    config: str
    options: dict[str, Any]
    kinds: tuple[str, ...] = ("causal",)
    calls: int = 2
    notes: str = ""
    patterns: tuple[str, ...] = field(default=())

    @property
    def encoder_decoder(self) -> bool:
        return "cross" in self.kinds


CAPTURED = [
    Species("llama", "LlamaForCausalLM", "LlamaConfig", LLAMA, notes="grouped queries, RoPE"),
    Species(
        "mistral", "MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": 7}, notes="sliding window",
        patterns=("Window",),
    ),
    Species("qwen3", "Qwen3ForCausalLM", "Qwen3Config", LLAMA, notes="normalised queries and keys"),
    Species(
        "gemma2", "Gemma2ForCausalLM", "Gemma2Config",
        {**LLAMA, "sliding_window": 7, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
        notes="softcap; window and full layers", patterns=("Causal", "Window"),
    ),
    Species(
        "gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig",
        {**LLAMA, "sliding_window": 7, "query_pre_attn_scalar": 8,
         "layer_types": ["sliding_attention", "full_attention"]},
        notes="window and full layers", patterns=("Causal", "Window"),
    ),
    Species(
        "gpt_oss", "GptOssForCausalLM", "GptOssConfig",
        {**LLAMA, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2},
        notes="sinks; window and full layers", patterns=("Causal", "Window"),
    ),
    Species("gpt2", "GPT2LMHeadModel", "GPT2Config", GPT, notes="learned positions"),
    Species(
        "opt", "OPTForCausalLM", "OPTConfig",
        {**SMALL, "hidden_size": 32, "ffn_dim": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "word_embed_proj_dim": 32},
        notes="learned positions",
    ),
    Species("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", BERT, notes="partial RoPE"),
    Species("phi", "PhiForCausalLM", "PhiConfig", {**BERT, "num_key_value_heads": 2}, notes="partial RoPE"),
    Species("bert", "BertModel", "BertConfig", BERT, ("self",)),
    Species("roberta", "RobertaModel", "RobertaConfig", {**BERT, "type_vocab_size": 1}, ("self",)),
    Species(
        "distilbert", "DistilBertModel", "DistilBertConfig",
        {**SMALL, "dim": 32, "hidden_dim": 40, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}, ("self",),
    ),
    Species(
        "modernbert", "ModernBertModel", "ModernBertConfig",
        {**BERT, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
        ("self",),
        notes="window on both sides and full layers", patterns=("Full", "Window"),
    ),
    Species(
        "t5", "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16},
        ("self", "causal", "cross"), 6, "relative position bias",
    ),
    Species("bart", "BartForConditionalGeneration", "BartConfig", BART, ("self", "causal", "cross"), 6),
    Species("marian", "MarianMTModel", "MarianConfig", BART, ("self", "causal", "cross"), 6),
    Species(
        "deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {**{name: value for name, value in LLAMA.items() if name != "head_dim"}, "num_key_value_heads": 4,
         "q_lora_rank": 16, "kv_lora_rank": 12,
         "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 4, "n_group": 1,
         "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
        notes="latent keys and values of another width",
    ),
    Species(
        "qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextConfig",
        {**LLAMA, **EXPERTS, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 2,
         "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "layer_types": ["linear_attention", "full_attention"]},
        calls=1, notes="its attention layers; its gated delta layers have no weights to show",
    ),
]  # fmt: skip

OTHERS = [
    Species(
        "albert", "AlbertModel", "AlbertConfig", {**BERT, "embedding_size": 16, "type_vocab_size": 2}, ("self",),
        notes="one module for all layers",
    ),
    Species(
        "vit", "ViTModel", "ViTConfig",
        {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8,
         "patch_size": 2, "num_channels": 1},
        ("self",), notes="patches as tokens",
    ),
    Species(
        "whisper", "WhisperForConditionalGeneration", "WhisperConfig",
        {**BART, "num_mel_bins": 4, "max_source_positions": 12, "max_target_positions": 24, "suppress_tokens": None,
         "begin_suppress_tokens": None},
        ("self", "causal", "cross"), 6, "sound as tokens",
    ),
]  # fmt: skip

ITEMS = [
    Species(
        "swin", "SwinModel", "SwinConfig",
        {"image_size": 32, "patch_size": 2, "num_channels": 1, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4],
         "window_size": 4, "drop_path_rate": 0.0},
        ("self",), 3, "relative position bias; an item for each window",
    ),
    Species(
        "patchtst", "PatchTSTModel", "PatchTSTConfig",
        {"num_input_channels": 3, "context_length": 32, "patch_length": 4, "patch_stride": 4, "d_model": 32,
         "norm_type": "layernorm", "ffn_dim": 40, "num_hidden_layers": 2, "num_attention_heads": 4},
        ("self",), notes="an item for each channel of a series",
    ),
]  # fmt: skip
"""Several items of a batch for one input."""

REFUSED = [
    Species("gptj", "GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 4}),
    Species(
        "gpt_neo", "GPTNeoForCausalLM", "GPTNeoConfig",
        {**SMALL, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    Species("bloom", "BloomForCausalLM", "BloomConfig", {**SMALL, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    Species("falcon", "FalconForCausalLM", "FalconConfig", BERT),
    Species(
        "mpt", "MptForCausalLM", "MptConfig", {**SMALL, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    ),
    Species("deberta_v2", "DebertaV2Model", "DebertaV2Config", BERT),
    Species("big_bird", "BigBirdModel", "BigBirdConfig", BERT),
    Species("longformer", "LongformerModel", "LongformerConfig", {**BERT, "attention_window": 8}),
    Species(
        "xlnet", "XLNetModel", "XLNetConfig", {**SMALL, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 40}
    ),
]  # fmt: skip


def grow(species: Species, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """A small model of this architecture whose attention logits spread."""
    import transformers  # here, so that this file can be collected without it

    torch.manual_seed(seed)
    config = getattr(transformers, species.config)(**species.options)
    model = getattr(transformers, species.model)(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and "embed" in name:
                weight.normal_(0, 1)
            elif weight.ndim >= 2:
                weight.normal_(0, 1.7 * weight.shape[-1] ** -0.5)
            elif "sink" in name or "bias" in name:
                weight.normal_(0, 0.5)
    return model.to(dtype)


def texts(species: Species, padding: str = "", batch: int = 2, n: int = 24, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tokens for a model; the second text is shorter where `padding` names a side."""
    torch.manual_seed(seed)
    if species.name == "vit":
        return {"pixel_values": torch.randn(batch, 1, 8, 8)}
    if species.name == "swin":
        return {"pixel_values": torch.randn(batch, 1, 32, 32)}
    if species.name == "patchtst":
        return {"past_values": torch.randn(batch, 32, 3)}
    if species.name == "whisper":
        return {"input_features": torch.randn(batch, 4, 24), **_padded(batch, 9, padding, "decoder_")}
    inputs = _padded(batch, n, padding, "")
    if species.encoder_decoder:
        inputs |= _padded(batch, n - 5, padding, "decoder_")
    return inputs


def _padded(batch: int, n: int, padding: str, prefix: str) -> dict[str, torch.Tensor]:
    ids, mask = torch.randint(3, VOCABULARY, (batch, n)), torch.ones(batch, n, dtype=torch.long)
    if not padding:
        return {f"{prefix}input_ids": ids}
    gap = slice(0, 6) if padding == "left" else slice(n - 6, n)
    mask[-1, gap] = 0
    return {f"{prefix}input_ids": ids.masked_fill(mask == 0, 0), f"{prefix}attention_mask": mask}
