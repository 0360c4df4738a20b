"""Heads of real models, for statements about trained attention.

Every call is stored (q, k after rotary embeddings, v, mask), so a check can build any operator from it. Models and
calls are cached for the process, because many statements use the same heads.

For comparison there are random heads: independent Gaussian queries and keys of the same width, the same number of
tokens, the same pattern, and logits of the same spread along a row. What random heads also show is not due to training.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from heedful.mechanisms import Quadratic, Softmax, no_activation
from heedful.operator import AttentionOperator
from heedful.segments import visible
from heedful.shapes import Float, Tensor
from heedful.theory.claim import Undecided

if TYPE_CHECKING:
    from heedful.hf.calls import Call


def model(name: str, trained: bool = True, seed: int = 0) -> tuple[Any, Any]:
    """(model, tokenizer) of "minilm" or "smollm2"; if not `trained`, with random weights drawn as its config says."""
    return _model(name, trained, seed)


@cache
def _model(name: str, trained: bool, seed: int) -> tuple[Any, Any]:
    try:
        from heedful.hf.load import load
    except ModuleNotFoundError as missing:
        raise Undecided(f"needs real models: {missing}") from missing
    try:
        found, tokenizer = load(name)
    except (OSError, ValueError, ModuleNotFoundError) as missing:
        raise Undecided(f"needs {name}: {missing}") from missing
    if not trained:
        torch.manual_seed(seed)
        found = type(found)(found.config).eval()
    return found, tokenizer


@cache
def calls(name: str, length: int, text: int = 0, trained: bool = True) -> tuple[Call, ...]:
    """The attention calls of a model on one passage of prose, layer by layer; heads are the second axis of q."""
    found, tokenizer = model(name, trained)  # raises if the model is missing, before anything is imported
    from heedful.hf.probe import Probe
    from heedful.hf.prose import encode, passages

    inputs = encode(found, tokenizer, passages()[text], length)
    seen: list[Call] = []
    with torch.no_grad():
        Probe(found)(inputs, seen.append)
    return tuple(seen)


def random_like(call: Call, seed: int) -> AttentionOperator:
    """Random heads with the same pattern, width and logit spread as a call's heads."""
    shape, generator = call.q.shape, torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, *shape, generator=generator).unbind()
    return Softmax(call.pattern).operator(q * spread(call)[..., None, None], k)


def spread(call: Call) -> Float[Tensor, "b h"]:
    """The standard deviation of the logits along a row, as a root mean square over the rows."""
    scores = Quadratic(no_activation, call.pattern, call.scale, normalise=None)  # zero for hidden keys
    logits = scores.matrix(call.q, call.per_head(call.k)).double()
    n, m = logits.shape[-2:]
    count = visible(call.pattern, n, m, call.segments).sum(-1)
    mean = logits.sum(-1) / count
    return (logits.square().sum(-1) / count - mean.square()).mean(-1).sqrt().float()
