"""Compare `heedful.nn.MultiheadAttention` with `torch.nn.MultiheadAttention`: outputs, weights and gradients.

    python benchmarks/drop_in.py

Runs both on the same weights and inputs (float32, CPU) over masks × padding × need_weights × batch_first × bias ×
kdim/vdim × add_bias_kv × add_zero_attn × self- and cross-attention.

First table: the largest differences, relative to the largest entry of the output, of the weights, and of all gradients
of the call (they share a loss, so they share a scale). If one is above 1e-6, the exit status is 1.

Second table: each tensor relative to its own largest entry, and the distance of both modules from torch's module in
float64. A gradient that is a small difference of large terms (in the keys' weights) is no more accurate in float32.
"""

from __future__ import annotations

import sys
import warnings
from copy import deepcopy
from itertools import product

import torch
from torch import nn

import heedful.nn

LIMIT = 1e-6
EMBED, HEADS, BATCH, N, M = 16, 4, 2, 7, 9
MASKS = ("none", "bool", "float", "bool, one a head", "float, one a head", "causal with the hint")
PADDINGS = ("none", "bool", "float")
WEIGHTS = {"weights": (True, True), "weights of each head": (True, False), "no weights": (False, True)}
OPTIONS = ("batch_first", "bias", "kdim", "add_bias_kv", "add_zero_attn")


def attn_mask(kind: str, n: int, m: int, draw: torch.Generator) -> torch.Tensor | None:
    if kind == "none":
        return None
    if kind.startswith("causal"):
        return torch.ones(n, m, dtype=torch.bool).triu(1)
    shape = (BATCH * HEADS, n, m) if "head" in kind else (n, m)
    if kind.startswith("float"):
        return torch.randn(shape, generator=draw)
    hidden = torch.rand(shape, generator=draw) < 0.4
    hidden[..., 0] = False  # for a row without keys torch returns NaN and heedful zeros, so leave one key
    return hidden


def key_padding_mask(kind: str, m: int, draw: torch.Generator) -> torch.Tensor | None:
    if kind == "none":
        return None
    if kind == "float":
        return torch.randn(BATCH, m, generator=draw)
    return torch.arange(m) >= torch.tensor([m, m // 2])[:, None]


def run(layer, inputs, arguments) -> dict[str, torch.Tensor]:
    """Output, weights, and the gradients of a fixed random function of both."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    query = leaves["query"]
    key = leaves.get("key", query)
    out, weights = layer(query, key, leaves.get("value", key), **arguments)
    draw = torch.Generator().manual_seed(1)
    loss = (out * torch.randn(out.shape, generator=draw).to(out)).sum()
    if weights is not None:
        loss = loss + (weights * torch.randn(weights.shape, generator=draw).to(weights)).sum()
    loss.backward()
    found = {"output": out.detach()} | ({} if weights is None else {"weights": weights.detach()})
    found |= {f"gradient in {name}": x.grad for name, x in leaves.items()}
    return found | {f"gradient in {name}": x.grad for name, x in layer.named_parameters()}


def differences(mask: str, padding: str, weights: str, options: dict[str, bool], crossed: bool, seed: int):
    draw = torch.Generator().manual_seed(seed)
    settings = {name: value for name, value in options.items() if name != "kdim"}
    if options["kdim"]:
        settings |= {"kdim": 12, "vdim": 20}
    torch.manual_seed(seed)
    theirs = nn.MultiheadAttention(EMBED, HEADS, **settings)
    torch.manual_seed(seed)
    ours = heedful.nn.MultiheadAttention(EMBED, HEADS, **settings)
    n, m = (N, M) if crossed else (M, M)
    sizes = {"query": (n, EMBED)} | ({"key": (m, EMBED)} if crossed else {})
    if options["kdim"]:
        sizes = {"query": (n, EMBED), "key": (m, 12), "value": (m, 20)}
    inputs = {
        name: torch.randn((BATCH, *size) if options["batch_first"] else (size[0], BATCH, size[1]), generator=draw)
        for name, size in sizes.items()
    }
    need, average = WEIGHTS[weights]
    arguments = {
        "attn_mask": attn_mask(mask, n, m, draw),
        "key_padding_mask": key_padding_mask(padding, m, draw),
        "need_weights": need,
        "average_attn_weights": average,
    }
    hint = mask.startswith("causal")
    # With the is_causal hint, torch hides the keys that it appends from some queries; then give it only the mask.
    extra = options["add_bias_kv"] or options["add_zero_attn"]
    hint_for_torch = {"is_causal": hint and not extra}
    in_double = {name: _double(x) for name, x in arguments.items()} | hint_for_torch
    truth = run(deepcopy(theirs).double(), {name: x.double() for name, x in inputs.items()}, in_double)
    expected = run(theirs, inputs, arguments | hint_for_torch)
    found = run(ours, inputs, arguments | {"is_causal": hint})
    gradients = max(float(x.abs().max()) for name, x in truth.items() if name.startswith("gradient"))
    for name, exact in truth.items():
        own = float(exact.abs().max())
        apart = _apart(found[name], expected[name])
        shared = apart / (gradients if name.startswith("gradient") else own)
        yield name, shared, apart / own, _apart(found[name], exact) / own, _apart(expected[name], exact) / own


def _double(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _apart(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).abs().max())


def main() -> int:
    torch.set_num_threads(1)  # the tensors are tiny
    warnings.filterwarnings("ignore", message="Support for mismatched")  # torch's, on mixed mask kinds
    rows = {(mask, padding): [0.0] * 4 for mask, padding in product(MASKS, PADDINGS)}
    tensors: dict[str, list[float]] = {}
    for seed, (mask, padding, weights, *flags, crossed) in enumerate(
        product(MASKS, PADDINGS, WEIGHTS, *([False, True] for _ in OPTIONS), [False, True])
    ):
        row = rows[mask, padding]
        row[0] += 1
        options = dict(zip(OPTIONS, flags, strict=True))
        for name, shared, *sizes in differences(mask, padding, weights, options, crossed, seed):
            column = {"output": 1, "weights": 2}.get(name, 3)
            row[column] = max(row[column], shared)
            tensors[name] = [max(pair) for pair in zip(sizes, tensors.get(name, [0.0] * 3), strict=True)]
    print(f"{'attn_mask':22}{'key_padding_mask':18}{'cases':>6}{'output':>10}{'weights':>10}{'gradients':>11}")
    for (mask, padding), (cases, *sizes) in rows.items():
        print(f"{mask:22}{padding:18}{cases:6.0f}{sizes[0]:10.1e}{sizes[1]:10.1e}{sizes[2]:11.1e}")
    print(f"\n{'tensor':28}{'heedful − torch':>16}{'heedful − float64':>19}{'torch − float64':>17}")
    for name, sizes in sorted(tensors.items(), key=lambda item: -item[1][0]):
        print(f"{name:28}{sizes[0]:16.1e}{sizes[1]:19.1e}{sizes[2]:17.1e}")
    largest = max(max(sizes) for _, *sizes in rows.values())
    verdict = "ok" if largest <= LIMIT else "FAIL"
    print(f"\n{verdict}: {sum(int(row[0]) for row in rows.values())} cases, largest {largest:.1e}, limit {LIMIT:.0e}")
    return int(verdict != "ok")


if __name__ == "__main__":
    sys.exit(main())
