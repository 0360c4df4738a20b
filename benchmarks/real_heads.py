"""Capture queries and keys of real models on real text, per head: after rotary embedding, groups repeated.

    python benchmarks/real_heads.py minilm|smollm2 [--length 1024] [--text FILE] [--offset 0]

writes runs/heads/<model>-<length>[-<offset>].safetensors with `q.<layer>` and `k.<layer>`, (heads, length, width) in
float32, and `scale`; an existing file is not overwritten. Without `--text` it uses the prose that comes with heedful.
`--offset` skips that many characters, to check a result on another passage. Needs heedful[hf]; `heedful.hf.Probe`
captures the heads and checks itself against the model's own attention. The weights come with two packages
(docs/models.md); those of SmolLM2 are quantised to 4 bits, so every figure made from them contains that noise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

RUNS = Path("runs/heads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["minilm", "smollm2"])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--offset", type=int, default=0)
    options = parser.parse_args()
    print(capture(options.model, options.text, options.length, options.offset))


def load(model: str, length: int, offset: int = 0) -> dict[str, torch.Tensor]:
    """Read what `capture` wrote."""
    from safetensors.torch import load_file

    path = _path(model, length, offset)
    if not path.exists():
        raise SystemExit(
            f"{path} is missing: run python benchmarks/real_heads.py {model} --length {length} --offset {offset} first."
        )
    return load_file(path)


def _path(model: str, length: int, offset: int) -> Path:
    return RUNS / (f"{model}-{length}" + (f"-{offset}" if offset else "") + ".safetensors")


def capture(model: str, text: Path | None, length: int, offset: int = 0) -> Path:
    from safetensors.torch import save_file

    from heedful import hf

    path = _path(model, length, offset)
    if path.exists():
        return path
    prose = " ".join(hf.passages()) if text is None else text.read_text(errors="replace")
    network, tokenizer = hf.load(model)
    heads: dict[str, torch.Tensor] = {}

    def visit(call: hf.Call) -> None:
        layer = len(heads) // 2
        for name, x in (("q", call.q), ("k", call.per_head(call.k))):
            heads[f"{name}.{layer}"] = x[0].float().contiguous()
        scales.add(call.scale)

    scales: set[float] = set()
    hf.Probe(network)(hf.encode(network, tokenizer, prose[offset:], length), visit)
    (scale,) = scales  # one for all layers of these models
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(heads | {"scale": torch.tensor(scale)}, path)
    return path


if __name__ == "__main__":
    main()
