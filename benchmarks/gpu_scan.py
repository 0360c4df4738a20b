"""Time `scan` on a GPU by length: a random Llama with 16 layers × 32 heads (8 KV heads), bf16.

    python benchmarks/gpu_scan.py [--lengths 2048 8192 32768] [--repeats 3] [--profile]

Heads have logits of different spread (query weights times 0.5 to 8), so several random-head baselines are measured, as
in a trained model. Each scan starts without cached baselines. Prints seconds and peak memory beyond the model; the
first scan of a process, which compiles kernels, is reported separately.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import heedful as h


def random_llama(layers: int = 16, heads: int = 32, width: int = 64, device: str = "cuda") -> LlamaForCausalLM:
    """A Llama with random weights; the heads' logits have standard deviations from about 0.4 to 6."""
    torch.manual_seed(0)
    size = heads * width
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=size,
        intermediate_size=4 * size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        head_dim=width,
        max_position_embeddings=1 << 17,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    factors = torch.logspace(-1, 3, heads, base=2, device=device)
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        order = torch.randperm(heads, device=device)
        weight.data.view(heads, width, size).mul_(factors[order, None, None].to(weight.dtype))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    model = random_llama(options.layers, device=options.device)
    rows = []
    for length in options.lengths:
        ids = torch.randint(0, 32000, (1, length), generator=torch.Generator().manual_seed(length))
        seconds = []
        for repeat in range(options.repeats + 1):
            held = torch.cuda.memory_allocated() if cuda else 0
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            profile = cProfile.Profile()
            with tempfile.TemporaryDirectory() as folder:
                start = perf_counter()
                if options.profile and repeat == options.repeats:
                    profile.enable()
                found = h.hf.scan(model, None, [ids], out=Path(folder) / "scan")
                profile.disable()
                seconds.append(perf_counter() - start)
                table = found.table()
            peak = (torch.cuda.max_memory_allocated() - held) / 2**30 if cuda else float("nan")
            if options.profile and repeat == options.repeats:
                pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        baseline = "base_rank90" in table.columns and table["base_rank90"].null_count() == 0
        first, *rest = seconds
        rows.append(
            {
                "length": length,
                "first": first,
                "seconds": sorted(rest)[len(rest) // 2] if rest else first,
                "least": min(rest or seconds),
                "most": max(rest or seconds),
                "GiB": peak,
                "heads": len(table),
                "baseline": baseline,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
