"""Heads of real models for the statements about trained attention.

Every call is kept (q, k after rotary embeddings, v, mask), so that a check can build any operator of it. What is
loaded is kept for the process, since many statements ask about the same heads.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from heedful.theory.claim import Undecided

if TYPE_CHECKING:
    from heedful.hf.calls import Call


@cache
def model(name: str, trained: bool = True, seed: int = 0) -> tuple[Any, Any]:
    """(model, tokenizer): "minilm" or "smollm2"; untrained, a copy with weights drawn anew as its config says."""
    try:
        from heedful import hf
    except ModuleNotFoundError as missing:
        raise Undecided(f"needs real models: {missing}") from missing
    try:
        found, tokenizer = hf.load(name)
    except (OSError, ValueError, ModuleNotFoundError) as missing:
        raise Undecided(f"needs {name}: {missing}") from missing
    if not trained:
        torch.manual_seed(seed)
        found = type(found)(found.config).eval()
    return found, tokenizer


@cache
def calls(name: str, length: int, text: int = 0, trained: bool = True) -> tuple[Call, ...]:
    """The attention calls of a model on one passage of prose, layer by layer; heads are the second axis of q."""
    found, tokenizer = model(name, trained)  # which says where models are missing, before anything is imported
    from heedful import hf

    inputs = hf.encode(found, tokenizer, hf.passages()[text], length)
    seen: list[Call] = []
    with torch.no_grad():
        hf.Probe(found)(inputs, seen.append)
    return tuple(seen)
