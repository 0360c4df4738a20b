"""Compare prefill, decode and cache bytes of attached models with transformers' sdpa.

    python benchmarks/swap.py --model smollm2 --tokens 8192 --share 0.6                    a CPU
    python benchmarks/swap.py --model llama-1b --tokens 32768 --share 0.8 --batch 16       a GPU, bf16, random weights

Each round runs every contender once, in turn, in one process: transformers with sdpa on a `DynamicCache` and on a
`StaticCache`, heedful with all heads exact, and heedful with a share of the KV groups (drawn from seed 0) on a window
of 256 and 4 sinks. Prints the minimum time over the rounds: CPU seconds of one thread on a CPU, wall seconds on a GPU.
Bytes are the size of the tensors in the cache, beside the size that `Plan.cost` predicts.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import heedful as h
import heedful.hf as hf

LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
}


def load(name: str) -> Any:
    if name != "llama-1b":
        return hf.load(name)[0].eval()
    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA_1B, dtype=torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def windowed(model: Any, share: float, window: int, sinks: int) -> hf.Plan:
    """A plan with some of the KV groups on a window, the same ones every time."""
    plan = hf.Plan.uniform(model)
    units = [(layer, unit) for layer, own in enumerate(plan.layers) for unit in range(len(own.units))]
    random.Random(0).shuffle(units)
    for layer, unit in units[: round(share * len(units))]:
        plan = plan.edit("window-sinks", layers=layer, units=unit, before=window - 1, sinks=sinks)
    return plan


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def held(cache: Any) -> int:
    if isinstance(cache, hf.HeedfulCache):
        return cache.bytes()
    return sum(x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values))


def measure(model: Any, make: Callable[[], Any], ids: torch.Tensor, steps: int) -> tuple[float, float, int]:
    """Seconds per prefill, seconds per step, bytes of the cache."""
    one = ids[:, :1]
    with torch.no_grad():
        cache, start = make(), clock(ids.device)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        filled = clock(ids.device)
        for _ in range(2):
            model(input_ids=one, past_key_values=cache, use_cache=True)
        begin = clock(ids.device)
        for _ in range(steps):
            model(input_ids=one, past_key_values=cache, use_cache=True)
        end = clock(ids.device)
    return filled - start, (end - begin) / steps, held(cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()

    model = load(asked.model)
    device, dtype = model.device, model.dtype
    if device.type == "cpu":
        torch.set_num_threads(1)
    ids = torch.randint(0, model.config.vocab_size, (asked.batch, asked.tokens), device=device)
    room = asked.tokens + asked.steps + 2
    plans = {
        "heedful, all exact": hf.Plan.uniform(model),
        f"heedful, {asked.share:.0%} windows": windowed(model, asked.share, asked.window, asked.sinks),
    }
    contenders: dict[str, tuple[hf.Plan | None, Callable[[], Any]]] = {
        "sdpa, dynamic": (None, DynamicCache),
        "sdpa, static": (None, lambda: StaticCache(config=model.config, max_cache_len=room)),
        **{name: (plan, lambda: hf.cache(model, room)) for name, plan in plans.items()},
    }
    best: dict[str, tuple[float, float, int]] = {}
    for _ in range(asked.rounds):
        for name, (plan, make) in contenders.items():
            hf.detach(model)
            model.set_attn_implementation("sdpa")
            if plan is not None:
                hf.attach(model, plan)
            found = measure(model, make, ids, asked.steps)
            known = best.get(name, found)
            best[name] = (min(found[0], known[0]), min(found[1], known[1]), found[2])
    print(f"{asked.model}, {asked.batch} × {asked.tokens} tokens, {device}, {dtype}, least of {asked.rounds}")
    first = best["sdpa, dynamic"]
    for name, (prefill, step, size) in best.items():
        plan = contenders[name][0]
        dims = h.Dims(1, room, 0, 0, batch=asked.batch, itemsize=dtype.itemsize)
        state = None if plan is None else plan.cost(dims).state
        said = "" if state is None else f", cost says {state * dtype.itemsize / 2**20:.1f}"
        print(
            f"  {name:<24} prefill {prefill:8.3f} s ({first[0] / prefill:.2f}×)  step {step * 1e3:8.2f} ms "
            f"({first[1] / step:.2f}×)  cache {size / 2**20:.1f} MiB{said}"
        )


if __name__ == "__main__":
    main()
