"""Masks as rules: the pattern is the one that transformers means, and a wrong guess is never kept."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'heedful[hf]'")

import torch
from transformers import LlamaConfig, masking_utils

import heedful as h
from heedful.hf import masks, tap
from heedful.segments import visible

N = 24


def ask(make, *, padding: str = "", n: int = N, **options):
    """The mask that transformers makes for heedful, and the boolean one that it makes for itself."""
    config = LlamaConfig(sliding_window=7, attention_chunk_size=5)
    mask = torch.ones(2, n, dtype=torch.long)
    mask[1, : 6 if padding == "left" else 0] = 0
    mask[1, n - 6 if padding == "right" else n :] = 0
    arguments = {"inputs_embeds": torch.zeros(2, n, 4), "attention_mask": mask, "past_key_values": None, **options}
    answers = []
    for name in (tap.NAME, "eager"):
        config._attn_implementation_internal = name
        answers.append(make(config, **arguments))
    allowed = torch.ones(2, 1, n, n, dtype=torch.bool) if answers[1] is None else answers[1] == 0
    return answers[0], allowed, mask.bool()


MADE = {
    "full": (masking_utils.create_bidirectional_mask, h.Full()),
    "causal": (masking_utils.create_causal_mask, h.Causal()),
    "window": (masking_utils.create_sliding_window_causal_mask, h.Window(6)),
    "window on both sides": (masking_utils.create_bidirectional_sliding_window_mask, h.Window(7, 7)),
    "chunks": (masking_utils.create_chunked_causal_mask, h.Causal() & h.Blocks(5)),
}


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("whole", [True, False], ids=["every pair", "some rows"])
def test_the_rule_is_the_mask(made, padding, whole, monkeypatch):
    if not whole:
        monkeypatch.setattr(masks, "COMPARED_WHOLE", 0)
    make, pattern = MADE[made]
    mask, allowed, real = ask(make, padding=padding)
    assert isinstance(mask, masks.DeferredMask) and mask.shape == (2, 1, N, N)
    rule = masks.rule_of(mask, N, N, crosses=False, queries=None, keys=None)
    assert rule.pattern == pattern and rule.bias is None
    seen = visible(rule.pattern, N, N, rule.segments).expand(2, 1, N, N)
    rows = real[:, None, :, None]
    assert torch.equal(seen & rows, allowed.expand(2, 1, N, N) & rows)


def test_a_window_longer_than_the_text_is_plainly_causal():
    mask, _, _ = ask(masking_utils.create_sliding_window_causal_mask, n=5)
    assert masks.rule_of(mask, 5, 5, crosses=False, queries=None, keys=None).pattern == h.Causal()


def test_a_guess_is_compared_with_the_predicate():
    """A predicate that is a window but for one pair is no window."""
    arguments = {
        "mask_function": lambda b, head, i, j: ((j <= i) & (j > i - 7)) | ((i == 20) & (j == 2)),
        "local_size": 7,
    }
    mask = masks.deferred_mask(1, N, N, **arguments)
    rule = masks.rule_of(mask, N, N, crosses=False, queries=None, keys=None)
    assert rule.pattern == h.Causal() and rule.bias is not None
    assert int((rule.bias == 0).sum()) == sum(min(i + 1, 7) for i in range(N)) + 1


def test_a_mask_of_no_pattern_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(masks, "DENSE_LIMIT", 100)
    mask = masks.deferred_mask(1, N, N, mask_function=lambda b, head, i, j: (i + j) % 3 == 0)
    with pytest.raises(masks.MaskNotUnderstood, match="neither full, causal, a window nor blocks"):
        masks.rule_of(mask, N, N, crosses=False, queries=None, keys=None)


def test_a_model_that_computes_with_its_mask_gets_the_dense_one():
    mask, allowed, _ = ask(masking_utils.create_sliding_window_causal_mask, padding="right")
    for computed in (mask + 0, mask[:, :, :, :N], torch.where(mask == 0, 0.0, -1.0)):
        assert not isinstance(computed, masks.DeferredMask)
        assert torch.equal(computed == 0, allowed)


def test_a_deferred_mask_takes_no_memory_and_moves_with_its_rule():
    mask = masks.deferred_mask(1, 2**20, 2**20, mask_function=lambda b, head, i, j: j <= i)
    with torch._C.DisableTorchFunctionSubclass():
        assert mask.untyped_storage().nbytes() == 4
    moved = mask.to("cpu")
    assert isinstance(moved, masks.DeferredMask) and moved.request is mask.request
    assert moved.shape == mask.shape and moved.dtype == torch.float32


def test_a_mask_for_other_lengths_is_refused():
    mask, _, _ = ask(masking_utils.create_causal_mask)
    with pytest.raises(masks.MaskNotUnderstood, match="24 × 24 in a call of 12 × 24"):
        masks.rule_of(mask, 12, N, crosses=False, queries=None, keys=None)


def test_a_mask_of_keys_alone_is_padding():
    keys = torch.ones(2, 1, 1, N, dtype=torch.bool)
    keys[1, ..., 20:] = False
    for mask in (keys, torch.zeros(keys.shape).masked_fill_(~keys, torch.finfo(torch.float32).min)):
        rule = masks.rule_of(mask, N, N, crosses=False, queries=None, keys=None)
        assert rule.pattern == h.Full() and rule.bias is None
        assert torch.equal(rule.segments[:, 0] >= 0, keys[:, 0, 0])
