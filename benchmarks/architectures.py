"""Build a tiny model of every transformers architecture, scan it, and compare with its own eager attention.

    python benchmarks/architectures.py                    # all that are not in the results yet; an hour on one core
    python benchmarks/architectures.py --only swin,llama  # these, again
    python benchmarks/architectures.py --page             # the table of docs/models.md, from the results

Each architecture runs in a separate process, with limits on time and memory. Its configuration is shrunk by rules on
the names of its fields. Weights are drawn so that logits spread over several units: if logits were near zero, a wrong
mask, scale or bias would not show. The verdicts:

    exact       every attention matrix that the model reports under eager is captured exactly once; outputs under the
                probe equal those of the untouched model; no softmax of the size of attention was missed; energy,
                entropy and largest weights of a scan are the means over items of the dense float64 matrices
    refused     heedful says why; nothing is measured
    not built   the shrunk configuration makes no model, or none of our inputs run it
    wrong       anything else
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

RESULTS = Path(__file__).parent / "results" / "architectures.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
TABLE = re.compile(r"(<!-- architectures: [^\n]* -->\n)(.*?)(<!-- end of architectures -->)", re.DOTALL)
PART = re.compile(r"_(model|text|vision|encoder|decoder|audio|config|thinker|talker|backbone)(_|$)")
SECONDS = 120  # for one architecture
MEMORY = 12 << 30  # bytes of address space for one architecture
MOST = 75_000_000  # parameters
VOCABULARY, TOKENS, PLAIN = 96, 24, 60  # ids from PLAIN on are special tokens: images, sounds, ends
WIDTH, HEADS, GROUPS, HEAD = 64, 4, 2, 16
LEAST = 0.2  # minimal spread of logits: with less, errors would not show
FLAT = (
    40  # maximal spread: beyond, rows have a single key, and float32 rounds weights by more than a tenth of a percent
)
TOLERANCE = 5e-5  # float32 rounds a score z by 6e-8 |z|, its weight by the same relative error; a few layers add up

# ---- configurations

FIELDS: list[tuple[str, Any]] = [
    (r"vocab_size$|^num_embeddings$", VOCABULARY),
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads|kv_n_heads|multi_query_group_num|num_query_groups)$", GROUPS),
    (r"head_dim$|d_kv$|attention_head_size$|^kv_channels$|head_width$", HEAD),
    (r"(heads?|attention_heads_num)$", HEADS),
    (r"lora_rank$", 16),
    (r"(experts_per_tok|experts_per_token|moe_top_?k|top_?k_experts|num_selected_experts)$", 2),
    (r"(n_group|topk_group)$", 1),
    (r"experts$|^moe_num_experts$|num_local_experts", 4),
    (r"(layers?|_depth|^depth|num_blocks|num_hidden_groups|layers_num)$", 2),
    (r"(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|max_\w*positions|seq_length|n_ctx)$", 128),
    (
        r"(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|d_inner|mlp_dim|feedforward\w*|inner_dim|hidden_dim_ff|ffn_size)$",
        64,
    ),
    (
        r"(hidden_size|d_model|embed_dim|n_embd|hidden_dim|hidden_channels|embedding_size|projection_dim|^dim|width|embedding_dim)$",
        WIDTH,
    ),
    (r"(proj_dim|output_dim|out_dim|latent_dim|_size_per_head|d_embed|word_embed_proj_dim|decoder_dim)$", WIDTH),
]
"""Upper limits of integer fields, by a pattern for the end of the field's name."""
NOT_WIDTHS = re.compile(r"(rotary|rope|conv|kernel|pool|stride|time|state|label)")
STAGES = {"depths": [2, 1, 1, 1, 1], "heads": [1, 2, 4, 8, 16], "widths": [16, 32, 64, 128, 256]}


def shrunk(config: Any, ids: dict[int, int], width: int = WIDTH) -> dict[str, Any]:
    """The fields of a configuration to change, with their new values."""
    from transformers import PreTrainedConfig

    changed: dict[str, Any] = {}
    for name in _fields(type(config)):
        try:
            value = getattr(config, name, None)
        except AttributeError:  # a field that each layer sets
            continue
        if isinstance(value, PreTrainedConfig):
            changed[name] = remade(value, ids, width)
        elif value is None and name in ("head_dim", "num_key_value_heads"):
            changed[name] = width // HEADS if name == "head_dim" else HEADS
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            new = _number(name, value, ids, width)
            if new != value:
                changed[name] = new
        elif isinstance(value, list | tuple) and value and all(type(x) is int for x in value):
            new = _list(name, list(value))
            if new != list(value):
                changed[name] = type(value)(new)
    if getattr(config, "rope_parameters", None) and "mrope_section" in (
        getattr(config, "ignore_keys_at_rope_validation", None) or ()
    ):
        changed["rope_parameters"] = _sections(config.rope_parameters, width)
    if "kv_lora_rank" in changed and "num_key_value_heads" in changed:  # keys of each head are computed from a latent
        changed["num_key_value_heads"] = changed.get("num_attention_heads", HEADS)
    kinds = getattr(config, "layer_types", None)
    if (
        "layer_types" in _fields(type(config))
        and isinstance(kinds, list | tuple)
        and kinds
        and isinstance(kinds[0], str)
        and "num_hidden_layers" in changed
    ):
        each = list(dict.fromkeys(kinds))
        changed["layer_types"] = each if len(each) > 1 else each * 2
        changed["num_hidden_layers"] = len(changed["layer_types"])
    return changed


def _fields(kind: type) -> list[str]:
    return [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "kwargs", "args")]


def _number(name: str, value: int, ids: dict[int, int], width: int) -> int:
    if re.search(r"token_(id|index)$|_token$|(begin|end|start)_id$", name):
        return value if value < PLAIN else ids.setdefault(value, PLAIN + len(ids) % (VOCABULARY - PLAIN))
    if name in ("image_size", "img_size", "input_size", "crop_size"):
        return min(value, 64)
    if name == "patch_size":
        return min(value, 8)
    for pattern, small in FIELDS:
        if re.search(pattern, name) and not (small == WIDTH and NOT_WIDTHS.search(name)):
            small = width if small == WIDTH else width // HEADS if small == HEAD else small
            return min(value, small)
    return value


def _list(name: str, value: list[int]) -> list[int]:
    size = len(value)
    if re.search(r"depths|layers$|num_blocks", name) and size <= 5:
        return [min(x, y) for x, y in zip(value, STAGES["depths"], strict=False)]
    if re.search(r"heads$", name) and size <= 5:
        return STAGES["heads"][:size]
    if re.search(r"(hidden_sizes|embed_dims?|dims|widths|channels)$", name) and size <= 5 and min(value) >= 16:
        return STAGES["widths"][:size]
    if name == "conv_dim":
        return [32] * size
    if name in ("image_size", "img_size", "input_size"):
        return [min(x, 64) for x in value]
    return value


def _sections(rope: dict[str, Any], width: int) -> dict[str, Any]:
    """Sections of a head's rotated channels for positions in time, height and width."""
    pairs = int(width // HEADS * rope.get("partial_rotary_factor", 1.0)) // 2
    return {**rope, "mrope_section": [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]}


def remade(config: Any, ids: dict[int, int], width: int = WIDTH) -> Any:
    """A small configuration of the same class."""
    return type(config)(**(shrunk(config, ids, width) | SPECIAL.get(config.model_type, {})))


WINDOWS = {"image_size": 32, "patch_size": 2, "window_size": 4, "depths": [2, 1], "num_heads": [2, 4]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32}
SERIES = {"prediction_length": 8, "context_length": 16, "d_model": 64}
SHORT = {"max_position_embeddings": 32}
WORDS = {"emb_dim": 64, "n_heads": 4, "n_layers": 2}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin"), WINDOWS),
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), SERIES),
    **dict.fromkeys(("flaubert", "xlm"), WORDS),
    **dict.fromkeys(("owlvit_text_model", "owlv2_text_model"), SHORT),
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_k": 2},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 32},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "patchtst": {"num_input_channels": 3},
    "perceiver": {"d_latents": 64, "num_latents": 16, "num_self_attends_per_block": 2},
}
"""Changes that do not follow from field names, by model type."""


def build(name: str, gain: float = 1.7) -> nn.Module:
    """A small random model with spread logits, by the first way of shrinking that works."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    errors = []
    for width in (WIDTH, 2 * WIDTH, 4 * WIDTH):
        try:
            config = remade(kind(), {}, width)
            return grown(config, gain)
        except Exception as error:
            errors.append(error)
    raise errors[0]


def grown(config: Any, gain: float) -> nn.Module:
    kind = model_class(config)
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(x.numel() for x in kind(config).parameters())
    if size > MOST:
        raise MemoryError(f"{size:,} parameters in the shrunk model")
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point() or not weight.numel():
                continue
            if weight.ndim >= 2 and "embed" in name and "proj" not in name and weight.ndim == 2:
                weight.normal_(0, 1)
            elif weight.ndim >= 2:
                weight.normal_(0, gain * (weight.numel() / weight.shape[0]) ** -0.5)
            elif "sink" in name or "bias" in name:
                weight.normal_(0, 0.5)
    return model.float()


def model_class(config: Any) -> type[nn.Module]:
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    try:
        found = MODEL_MAPPING[type(config)]
        return found[0] if isinstance(found, tuple) else found
    except KeyError:
        pass
    module = sys.modules[type(config).__module__]
    package = __import__(module.__name__.replace("configuration_", "modeling_"), fromlist=["*"])
    kinds = [
        kind
        for kind in vars(package).values()
        if inspect.isclass(kind) and issubclass(kind, PreTrainedModel) and kind.config_class is type(config)
        and "PreTrainedModel" not in kind.__name__
    ]  # fmt: skip
    if not kinds:
        raise LookupError("transformers has a configuration and no model for it")
    return kinds[0]


# ---- inputs


def candidates(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Candidate inputs for the model, the most complete first."""
    config: Any = model.config
    known = inspect.signature(model.forward).parameters
    torch.manual_seed(1)
    ids = torch.randint(3, PLAIN, (1, TOKENS))
    text: dict[str, Any] = {"input_ids": ids} if "input_ids" in known else {}
    if "decoder_input_ids" in known and getattr(config, "is_encoder_decoder", False):
        text["decoder_input_ids"] = torch.randint(3, PLAIN, (1, TOKENS - 5))
    if "bbox" in known:
        corner = torch.randint(0, 50, (1, TOKENS, 2))
        text["bbox"] = torch.cat([corner, corner + 20], -1)
    others = list(_others(model, known))
    decoder = {name: x for name, x in text.items() if name.startswith("decoder")}
    for other in others:
        if "input_ids" in text:
            yield {**text, **other}
        yield {**decoder, **other}
        if not decoder and "decoder_input_ids" in known:
            yield {"decoder_input_ids": ids, **other}
    if text:
        yield text
        yield {**text, "attention_mask": torch.ones(1, TOKENS, dtype=torch.long)}
    if "inputs_embeds" in known:
        width = _field(config, "hidden_size", "d_model", "embed_dim", "n_embd")
        yield {"inputs_embeds": torch.randn(1, TOKENS, width)}


def _others(model: nn.Module, known: Any) -> Iterator[dict[str, Any]]:
    """Inputs of images, sounds and series."""
    config: Any = model.config
    size, channels = (
        _field(config, "image_size", "img_size", "input_size", default=64),
        _field(config, "num_channels", "in_channels", "in_chans", default=3),
    )
    size = size if isinstance(size, list | tuple) else (size, size)
    for name in ("pixel_values", "pixel_values_videos"):
        if name in known:
            for shape in ((channels, *size), (channels, 64, 64), (3, 224, 224)):
                frames = _field(config, "num_frames", default=2)
                yield {name: torch.randn(1, *shape)}
                yield {name: torch.randn(1, frames, *shape)}
    for name in ("input_features", "input_values", "audio_values"):
        if name in known:
            bins = _field(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", default=80)
            length = 2 * _field(config, "max_source_positions", default=32)
            for shape in ((bins, length), (64, bins), (4000,), (1, 4000), (1, 1024, bins), (1024, bins)):
                yield {name: torch.randn(1, *shape)}
    if "past_values" in known:
        length, width = (
            _field(config, "context_length", default=32),
            _field(config, "num_input_channels", "input_size", default=1),
        )
        lags = max(_field(config, "lags_sequence", default=[0]) or [0])
        past = torch.randn(1, length + lags, width)
        yield {"past_values": past}
        yield {"past_values": past[..., 0]}
        series = {
            "past_values": past if width > 1 else past[..., 0],
            "past_time_features": torch.randn(1, length + lags, max(1, _field(config, "num_time_features", default=1))),
            "past_observed_mask": torch.ones_like(past if width > 1 else past[..., 0]),
            "future_values": torch.randn(1, _field(config, "prediction_length", default=8) or 8),
            "future_time_features": torch.randn(
                1,
                _field(config, "prediction_length", default=8) or 8,
                max(1, _field(config, "num_time_features", default=1)),
            ),
        }
        yield {name: x for name, x in series.items() if name in known}
    if "inputs" in known:
        yield {"inputs": torch.randint(3, PLAIN, (1, TOKENS))}
        yield {"inputs": torch.randn(1, TOKENS, _field(config, "d_model", default=32))}


def _field(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that the configuration or a nested one has."""
    inside = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for one in [config, *inside]:
        for name in names:
            value = getattr(one, name, None)
            if value is not None and not isinstance(value, dict):
                return value
    return default


# ---- the model's own attention


class Softmaxes(TorchFunctionMode):
    """Records the shapes of all softmax inputs that may be attention scores."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("softmax", "_softmax") and isinstance(out, torch.Tensor):
            self.shapes[tuple(out.shape)] += 1
        if func is nn.functional.scaled_dot_product_attention:
            q, k = args[0], args[1]
            self.shapes[(*q.shape[:-1], k.shape[-2])] += 1
        return out


def runnable(model: nn.Module) -> dict[str, Any]:
    """The first inputs for which the untouched model, under eager attention, returns finite outputs."""
    from heedful.hf.checks import floating_tensors
    from heedful.hf.tap import implementation, prepared

    errors = []
    for inputs in candidates(model):
        try:
            with prepared(model), implementation(model, "eager"):
                out = model(**inputs)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            continue
        if any(bool(x.isfinite().all()) and x.numel() for x in floating_tensors(out)):
            return inputs
        errors.append("outputs are not finite")
    raise LookupError("no inputs of ours run it: " + (errors[0] if errors else "none to try")[:160])


def reported(out: Any) -> list[torch.Tensor]:
    """All attention matrices that a model reports, in order."""
    found: list[torch.Tensor] = []

    def collect(x: Any) -> None:
        if isinstance(x, torch.Tensor):
            if x.ndim == 4:
                found.append(x)
        elif isinstance(x, list | tuple):
            for part in x:
                collect(part)

    for name, value in getattr(out, "items", dict)():
        if "attentions" in name:
            collect(value)
    return found


def judged(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """The verdict on one model."""
    import heedful.hf as hf
    from heedful.hf.checks import floating_tensors
    from heedful.hf.tap import implementation, prepared

    with prepared(model), implementation(model, "eager"):
        torch.manual_seed(0)  # as under the probe
        with Softmaxes() as seen:
            expected = floating_tensors(model(**inputs))
        own: list[torch.Tensor] = []
        try:
            torch.manual_seed(0)  # as under the probe
            own = reported(model(**inputs, output_attentions=True))
        except Exception:
            own = []
    calls: list[tuple[hf.Call, torch.Tensor]] = []
    outputs: list[Any] = []
    hook = model.register_forward_hook(lambda module, args, out: outputs.append(out))
    try:
        torch.manual_seed(0)  # as under the probe
        extra = {"logits_to_keep": 0} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        hf.Probe(model)(
            {**inputs, **extra},
            lambda call: calls.append((call, call.softmaxes.to(torch.float64).operator().to_dense())),
        )
    except (hf.Refused, hf.CheckFailed) as reason:
        return {"verdict": "refused", "why": str(reason)}
    finally:
        hook.remove()
    found = {
        "calls": len(calls),
        "kinds": sorted({call.kind for call, _ in calls}),
        "items": max(len(call.q) for call, _ in calls),
        "spread": round(max(float(_spread(call)) for call, _ in calls), 2),
        "reported": len(own),
        "inputs": sorted(inputs),
    }
    wrong = [*_unmatched(own, calls), *_outputs_differ(floating_tensors(outputs[-1]), expected), *_missed(seen, calls)]
    wrong += _scanned(model, inputs, calls)
    return {**found, "verdict": "wrong" if wrong else "exact", "why": "; ".join(wrong)}


def _spread(call: Any) -> torch.Tensor:
    return (call.q.float() @ call.per_head(call.k).float().mT * call.scale).std()


def _unmatched(own: list[torch.Tensor], calls: list) -> list[str]:
    """Sentences on reported matrices without a call, and on matrices that were captured more than once."""
    left, why = list(range(len(calls))), []
    for at, matrix in enumerate(own):
        hits = [i for i in left if calls[i][1].shape == matrix.shape and _close(calls[i], matrix)]
        if hits:
            left.remove(hits[0])
        else:
            why.append(f"reported matrix {at} {tuple(matrix.shape)} is none of the captured")
    if own:
        for i in left:
            if any(calls[i][1].shape == x.shape and _close(calls[i], x) for x in own):
                why.append(f"{calls[i][0].name} is captured more often than the model reports it")
    return why[:2]


def _close(call: Any, matrix: torch.Tensor) -> bool:
    found = [call[1]]
    if call[0].sink is not None:  # some models report weights normalised without the sink
        found.append(call[1] / call[1].sum(-1, keepdim=True).clamp(min=1e-300))
    differences = [(x - matrix.double()).abs().amax((1, 3))[call[0].real] for x in found]
    return any(bool((difference <= TOLERANCE).all()) for difference in differences)


def _outputs_differ(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[str]:
    if len(found) != len(expected):
        return [f"{len(found)} outputs under the probe, {len(expected)} without"]
    for x, y in zip(found, expected, strict=True):
        if x.shape != y.shape:
            return [f"an output of {tuple(x.shape)} under the probe, {tuple(y.shape)} without"]
        finite = y.isfinite()
        if finite.any() and float((x - y)[finite].abs().max()) > 1e-3 * max(float(y[finite].abs().max()), 1e-6):
            return ["outputs under the probe are others"]
    return []


def _missed(seen: Softmaxes, calls: list) -> list[str]:
    """Softmaxes over tokens, with three or four axes, that belong to no call: attention that the probe missed."""
    left = Counter(seen.shapes)
    for call, matrix in calls:
        b, h, n, m = matrix.shape
        for shape in ((b, h, n, m), (b * h, n, m), (b, h, n, m + 1)):
            if left[shape]:
                left[shape] -= 1 if call.minus is None else 2  # differential heads: a call per half of the values
                break
    lengths = {x for call, matrix in calls for x in matrix.shape[-2:]}
    missed = [
        shape
        for shape, count in left.items()
        if count > 0 and len(shape) >= 3 and shape[-1] in lengths and shape[-1] > 4
    ]
    return [f"a softmax over {shape} that was not captured" for shape in missed[:2]]


def _scanned(model: nn.Module, inputs: dict[str, Any], calls: list) -> list[str]:
    """Compare the rows of a scan with the dense float64 matrices, averaged over items."""
    import heedful.hf as hf

    with tempfile.TemporaryDirectory() as folder:
        found = hf.scan(model, None, [inputs], out=Path(folder) / "run", options=hf.ScanOptions(values=4))
        rows = found.rows.sort("layer", "head").to_dicts()
    expected = [(call.at, head) for call, _ in calls for head in range(call.heads)]
    if [(row["layer"], row["head"]) for row in rows] != expected:
        return [f"{len(rows)} rows of a scan, {len(expected)} heads"]
    truth = {}
    for call, matrix in calls:
        shown = matrix if call.minus is None else call.to(torch.float64).operator().to_dense()
        for name, value in _measures(call, shown).items():
            for head, x in enumerate(value.tolist()):
                truth[call.at, head, name] = x
    for row in rows:
        for name in ("energy", "entropy", "largest"):
            x, y = row[name], truth[row["layer"], row["head"], name]
            if x is None or not abs(x - y) <= 2e-3 * max(abs(y), 1):
                return [f"{name} of layer {row['layer']} head {row['head']} is {x} in the scan, {y:.4g} by its matrix"]
    return []


def _measures(call: Any, a: torch.Tensor) -> dict[str, torch.Tensor]:
    """Energy, entropy and largest weight: means over queries, then over items. (b, h, n, m) → (h,)."""
    size = a.abs()
    rows = size.sum(-1)
    if call.sink is not None:
        p = torch.cat([size, (1 - rows).clamp(min=0)[..., None]], -1)
    else:
        p = size / rows.clamp(min=1e-300)[..., None]
    entropy = -torch.xlogy(p, p).sum(-1)
    seeing = (rows > 0).double()

    def over(x: torch.Tensor) -> torch.Tensor:
        return ((x * seeing).sum(-1) / seeing.sum(-1)).nanmean(0)

    return {"energy": a.square().sum((-2, -1)).mean(0), "entropy": over(entropy), "largest": over(size.amax(-1))}


# ---- running all architectures


def attempt(name: str) -> dict[str, Any]:
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(60)
    for gain in (1.7, 0.5, 0.15, 0.05):
        found = _attempted(name, gain)
        if found.get("spread", 0) <= FLAT:
            break
    if found["verdict"] == "exact" and found["spread"] < LEAST:
        return {"verdict": "not built", "why": f"no inputs of ours run it: logits spread by {found['spread']} alone"}
    return found


def _attempted(name: str, gain: float) -> dict[str, Any]:
    import heedful.hf as hf

    try:
        model = build(name, gain)
    except Exception as error:
        return {"verdict": "not built", "why": f"{type(error).__name__}: {_short(error)}"}
    try:
        why = hf.objections(model)
        if why:
            return {"verdict": "refused", "why": why[0], "class": type(model).__name__}
        inputs = runnable(model)
    except LookupError as error:
        return {"verdict": "not built", "why": _short(error), "class": type(model).__name__}
    try:
        return {**judged(model, inputs), "class": type(model).__name__}
    except Exception as error:
        import traceback

        traceback.print_exc()
        return {"verdict": "wrong", "why": f"{type(error).__name__}: {_short(error)}", "class": type(model).__name__}


def _short(error: object) -> str:
    return " ".join(str(error).split())[:200]


def apart(name: str) -> dict[str, Any]:
    """Run one attempt in a separate process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        there.send(attempt(name))

    process = context.Process(target=work)
    process.start()
    there.close()
    try:
        found = here.recv() if here.poll(SECONDS) else {"verdict": "not built", "why": f"more than {SECONDS} seconds"}
    except EOFError:
        found = {"verdict": "not built", "why": "its process ended without a word"}
    process.kill()
    process.join()
    return {"name": name, **found}


def read_results(path: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The results by name; the last line of each name counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def write_results(rows: dict[str, dict[str, Any]], path: Path = RESULTS) -> None:
    """Write one line for each name, in order."""
    lines = [json.dumps(rows[name], ensure_ascii=False) + "\n" for name in sorted(rows)]
    path.write_text("".join(lines), encoding="utf-8")


# ---- the page

ITSELF = "computes its weights itself"
NOTHING = "has no module that attends"
GROUPED = (
    ("exact", "causal", lambda row: row["kinds"] == ["causal"]),
    ("exact", "self", lambda row: row["kinds"] == ["self"] and row["items"] == 1),
    ("exact", "self, several items for one input", lambda row: row["kinds"] == ["self"]),
    ("exact", "several kinds (self, causal, cross)", lambda row: True),
    ("refused", "a module computes its weights itself", lambda row: ITSELF in row["why"]),
    ("refused", "no module attends", lambda row: NOTHING in row["why"]),
    ("refused", "for another reason, below", lambda row: True),
    ("wrong", "", lambda row: True),
    ("not built", "a library is missing", lambda row: "ImportError" in row["why"]),
    (
        "not built",
        "part of another model, or no class",
        lambda row: row["why"].startswith(("LookupError", "ModuleNot")),
    ),
    ("not built", "no inputs of ours run it", lambda row: row["why"].startswith("no inputs")),
    ("not built", "the shrunk configuration makes no model", lambda row: True),
)
"""(verdict, group, condition): a row goes to the first group of its verdict whose condition holds."""


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The verdicts on all architectures, as Markdown."""
    groups: dict[tuple[str, str], list[str]] = {(verdict, group): [] for verdict, group, _ in GROUPED}
    for name in sorted(rows):
        row = rows[name]
        group = next(group for verdict, group, fits in GROUPED if verdict == row["verdict"] and fits(row))
        groups[row["verdict"], group].append(_named(row))
    count = Counter(row["verdict"] for row in rows.values())
    versions = ", ".join(sorted({row["transformers"] for row in rows.values()}))
    lines = [
        f"{len(rows)} configurations of transformers {versions}: **{count['exact']} exact, {count['refused']} refused, "
        f"{count['wrong']} wrong**, {count['not built']} not built.",
        "",
        "| verdict | number | architectures |",
        "|---|---|---|",
    ]
    for (verdict, group), names in groups.items():
        if names or verdict == "wrong":
            lines.append(f"| {verdict}{': ' if group else ''}{group} | {len(names)} | {', '.join(names) or 'none'} |")
    others = [row for row in rows.values() if row["verdict"] == "refused" and not _usual(row)]
    if others:
        lines += ["", "Refused for another reason:", ""]
        lines += [f"- {row['name']}: {row['why']}" for row in sorted(others, key=lambda row: row["name"])]
    return "\n".join(lines) + "\n"


def _usual(row: dict[str, Any]) -> bool:
    return ITSELF in row["why"] or NOTHING in row["why"]


def _named(row: dict[str, Any]) -> str:
    """The name, with the class that prevents capture; a star if the model reports no matrices to compare with."""
    if row["verdict"] == "refused" and ITSELF in row["why"]:
        return f"{row['name']} (`{row['why'].partition(' (')[0]}`)"
    return row["name"] + ("\\*" if row["verdict"] == "exact" and not row["reported"] else "")


def write_page(rows: dict[str, dict[str, Any]]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda found: found[1] + table(rows) + found[3], text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names, with commas between them; these are run again")
    parser.add_argument("--again", help="run those again whose verdict is this")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a file of JSON lines, which is added to")
    parser.add_argument("--page", action="store_true", help="write the table into docs/models.md and end")
    options = parser.parse_args()
    done = read_results(options.results)
    if options.page:
        write_results(done, options.results)
        write_page(done)
        return
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    import heedful.hf  # noqa: F401  (once, before the processes fork)

    torch.set_num_threads(1)
    if options.only:
        names = options.only.split(",")
    elif options.again:
        names = [name for name, row in done.items() if row["verdict"] == options.again]
    else:  # whole models first, then parts of models
        names = sorted((name for name in CONFIG_MAPPING_NAMES if name not in done), key=lambda x: bool(PART.search(x)))
    for name in names:
        row = {**apart(name), "transformers": transformers.__version__}
        print(row["verdict"], name, row.get("why", ""), flush=True)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
