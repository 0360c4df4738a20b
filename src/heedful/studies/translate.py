"""Beam search: the translations that a trained model finds most likely.

Each step runs the decoder on the whole prefix again, which any mechanism can do; many sentences in a batch make it
quick. A sentence is done when as many hypotheses have ended as the beam is wide. They are ranked by
log p / ((5 + length) / 6)^α (Wu et al. 2016, arXiv:1609.08144, eq. 14).
"""

from __future__ import annotations

import torch

from heedful.nn import Transformer
from heedful.shapes import Float, Int, Tensor
from heedful.studies.data import BEGIN, END, PAD, Pairs, by_length, gather, rounded
from heedful.studies.train import reduced_precision


@torch.no_grad()
def translate(
    model: Transformer, pairs: Pairs, device: torch.device, *, beam: int = 5, alpha: float = 1.0, tokens: int = 16384
) -> list[list[int]]:
    """Tokens of the best translation found for the source of each pair."""
    model.eval()
    found: list[list[int]] = [[] for _ in range(len(pairs))]
    alone = Pairs(pairs.source, pairs.source)  # the length of the reference must have no say
    for rows in by_length(pairs.source.lengths + 1, tokens, torch.arange(len(pairs))):
        batch = gather(alone, rows, device)
        with reduced_precision(device):
            memory = model.encode(batch.source, segments=batch.segments, words=batch.words)
        longest = min(2 * int(pairs.source.lengths[rows].max()) + 10, 200)
        best = search(model, memory, batch.segments, longest, beam, alpha)
        for row, tokens_found in zip(rows.tolist(), best, strict=True):
            found[row] = tokens_found
    return found


def search(
    model: Transformer,
    memory: Float[Tensor, "b n d"],
    segments: Int[Tensor, "b n"],
    longest: int,
    beam: int,
    alpha: float,
) -> list[list[int]]:
    """The best hypothesis for each sentence of the memory; sentences that are done leave the batch."""
    device, count = memory.device, len(memory)
    alive = torch.arange(count, device=device)
    prefix = torch.full((count, beam, rounded(longest + 1)), PAD, device=device)
    prefix[:, :, 0] = BEGIN
    scores = torch.full((count, beam), -torch.inf, device=device)
    scores[:, 0] = 0
    missing = torch.full((count,), beam, device=device)
    ended_score = torch.full((count,), -torch.inf, device=device)
    ended = torch.full((count, longest + 1), PAD, device=device)
    for length in range(1, longest + 1):
        width = rounded(length)
        log_p = _next(model, prefix[alive, :, :width], memory[alive], segments[alive], length - 1)
        log_p[..., [PAD, BEGIN]] = -torch.inf
        if length == longest:
            only_end = log_p[..., END].clone()
            log_p.fill_(-torch.inf)
            log_p[..., END] = only_end
        total = (scores[alive][..., None] + log_p).flatten(1)
        top, choice = total.topk(2 * beam, dim=-1)
        origin, token = choice // log_p.shape[-1], choice % log_p.shape[-1]
        norm = ((5 + length) / 6) ** alpha
        ends = token == END
        # Hypotheses that end here, if they are among the best: the first of them against the best so far.
        closing = ends & (torch.arange(2 * beam, device=device) < beam) & top.isfinite()
        missing[alive] -= closing.sum(-1)
        done, which = torch.where(closing, top / norm, -torch.inf).max(-1)
        better = done > ended_score[alive]
        row = alive[better]
        ended[row] = PAD
        ended[row, : length - 1] = prefix[row, origin[better, which[better]], 1:length]
        ended_score[row] = done[better]
        # The best that go on.
        kept, order = torch.where(ends, -torch.inf, top).topk(beam, dim=-1)
        lines = prefix[alive[:, None], origin.gather(-1, order)]
        lines[:, :, length] = token.gather(-1, order)
        prefix[alive], scores[alive] = lines, kept
        alive = alive[missing[alive] > 0]
        if not len(alive):
            break
    return [[token for token in line if token != PAD] for line in ended.tolist()]


def _next(
    model: Transformer, prefix: Int[Tensor, "b k m"], memory: Tensor, segments: Tensor, at: int
) -> Float[Tensor, "b k vocabulary"]:
    """Log-probabilities of the token after position `at` of each prefix."""
    count, beam, _ = prefix.shape
    memory, segments = (x.repeat_interleave(beam, 0) for x in (memory, segments))
    with reduced_precision(memory.device):
        x = model.decode(prefix.flatten(0, 1), memory, memory_segments=segments)
        logits = model.logits(x[:, at])
    return logits.float().log_softmax(-1).unflatten(0, (count, beam))
