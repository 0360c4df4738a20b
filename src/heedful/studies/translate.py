"""Beam search for the most likely translations of a trained model.

The decoder goes token by token. Keys and values of the prefixes are cached and reordered with the hypotheses. Those of
the encoder's output are projected once per sentence; all hypotheses of a sentence attend to them in one row. A sentence
is done when as many hypotheses have ended as the beam is wide. They are ranked by log p / ((5 + length) / 6)^α (Wu et
al. 2016, arXiv:1609.08144, eq. 14).
"""

from __future__ import annotations

import torch

from heedful.nn import Attention, Transformer
from heedful.shapes import Float, Int, Tensor
from heedful.studies.data import BEGIN, END, PAD, Pairs, by_length, gather
from heedful.studies.step import encode

LOOK_EVERY = 8
"""Finished sentences leave the batch every this many tokens; checking more often would wait for the device."""


@torch.no_grad()
def translate(
    model: Transformer, pairs: Pairs, device: torch.device, *, beam: int = 5, alpha: float = 1.0, tokens: int = 16384
) -> list[list[int]]:
    """Tokens of the best translation of the source of each pair."""
    model.eval()
    found: list[list[int]] = [[] for _ in range(len(pairs))]
    alone = Pairs(pairs.source, pairs.source)  # the length of the reference must not matter
    for rows in by_length(pairs.source.lengths + 1, tokens, torch.arange(len(pairs))):
        batch = gather(alone, rows, device)
        longest = min(2 * int(pairs.source.lengths[rows].max()) + 10, 200)
        best = search(model, encode(model, batch), batch.segments, longest, beam, alpha)
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
    """The best hypothesis for each sentence of the memory."""
    device, count = memory.device, len(memory)
    decoder = Decoder(model, memory, segments, beam)
    ended = torch.full((count, longest + 1), PAD, device=device)
    alive = torch.arange(count, device=device)  # rows of `ended` that the tensors below belong to
    prefix = torch.full((count, beam, longest + 1), BEGIN, device=device)
    scores = torch.full((count, beam), -torch.inf, device=device)
    scores[:, 0] = 0
    missing = torch.full((count,), beam, device=device)
    best = torch.full((count,), -torch.inf, device=device)
    within = torch.arange(2 * beam, device=device) < beam
    for length in range(1, longest + 1):
        log_p = decoder(prefix[:, :, length - 1], length - 1)
        log_p[..., PAD] = log_p[..., BEGIN] = -torch.inf
        if length == longest:
            only_end = log_p[..., END].clone()
            log_p.fill_(-torch.inf)
            log_p[..., END] = only_end
        top, choice = (scores[..., None] + log_p).flatten(1).topk(min(2 * beam, beam * log_p.shape[-1]), dim=-1)
        origin, token = choice // log_p.shape[-1], choice % log_p.shape[-1]
        ends = token == END
        # Hypotheses among the best that end here: compare the first of them with the best so far.
        closing = ends & within[: ends.shape[-1]] & top.isfinite() & (missing > 0)[:, None]
        missing = missing - closing.sum(-1)
        done, which = torch.where(closing, top / ((5 + length) / 6) ** alpha, -torch.inf).max(-1)
        better = done > best
        best = torch.where(better, done, best)
        line = prefix.gather(1, origin.gather(1, which[:, None])[..., None].expand(-1, 1, prefix.shape[-1]))[:, 0]
        line = torch.where(torch.arange(longest + 1, device=device) < length, line, PAD)
        ended[alive] = torch.where(better[:, None], line, ended[alive])
        # The best hypotheses that continue.
        scores, order = torch.where(ends, -torch.inf, top).topk(beam, dim=-1)
        parent = origin.gather(-1, order)
        prefix = prefix.gather(1, parent[..., None].expand(-1, -1, prefix.shape[-1]))
        if length <= longest:
            prefix[:, :, length] = token.gather(-1, order)
        decoder.follow(parent)
        if length % LOOK_EVERY == 0:
            keep = (missing > 0).nonzero().flatten()
            if not len(keep):
                break
            if len(keep) <= 0.8 * len(alive):
                alive, prefix, scores, missing, best = (x[keep] for x in (alive, prefix, scores, missing, best))
                decoder.keep(keep)
    return [[token for token in line if token not in (PAD, BEGIN)] for line in ended.tolist()]


class Decoder:
    """The decoder of a model; each call decodes one token of every hypothesis."""

    def __init__(
        self, model: Transformer, memory: Float[Tensor, "b n d"], segments: Int[Tensor, "b n"], beam: int
    ) -> None:
        self.model, self.beam = model, beam
        self.own = [_attention(layer.attention) for layer in model.decoder]
        self.cross = [_attention(layer.cross) for layer in model.decoder]
        self.memory = [attention.keys_and_values(memory) for attention in self.cross]
        self.past: list[tuple[Tensor, Tensor] | None] = [None] * len(self.own)
        self._see(segments)

    def __call__(self, tokens: Int[Tensor, "b beam"], at: int) -> Float[Tensor, "b beam vocabulary"]:
        """Log-probabilities of the next token, after these tokens at position `at`."""
        here = torch.full((1,), at, device=tokens.device)
        x = self.model.embed(tokens.reshape(-1, 1), positions=here)
        for number, layer in enumerate(self.model.decoder):
            x = self._layer(number, layer, x, here)
        assert self.model.decoder_norm is not None
        logits = self.model.logits(self.model.decoder_norm(x[:, 0]))
        return logits.float().log_softmax(-1).unflatten(0, (-1, self.beam))

    def _layer(
        self, number: int, layer, x: Float[Tensor, "rows 1 d"], here: Int[Tensor, " 1"]
    ) -> Float[Tensor, "rows 1 d"]:
        own, cross = self.own[number], self.cross[number]
        first, between, last = layer.norms
        normed = first(x)
        k, v = own.keys_and_values(normed, here)
        past = self.past[number]
        if past is not None:
            k, v = torch.cat([past[0], k], -2), torch.cat([past[1], v], -2)
        self.past[number] = k, v
        x = x + own.join(own.mechanism(own.queries(normed, here), k, v))
        # The hypotheses of a sentence are the queries of one row: (b, heads, beam, d).
        q = cross.queries(between(x)[:, 0].unflatten(0, (-1, self.beam)))
        out = cross.join(cross.mechanism(q, *self.memory[number], segments=self.segments))
        x = x + out.flatten(0, 1)[:, None]
        return x + layer.feed(last(x))

    def follow(self, parent: Int[Tensor, "b beam"]) -> None:
        """Continue each hypothesis from hypothesis `parent` of its sentence."""
        rows = torch.arange(len(parent), device=parent.device)[:, None] * self.beam + parent
        self._select(rows.flatten())

    def keep(self, sentences: Int[Tensor, " b"]) -> None:
        """Continue with these sentences only."""
        rows = sentences[:, None] * self.beam + torch.arange(self.beam, device=sentences.device)
        self._select(rows.flatten())
        self.memory = [(k[sentences], v[sentences]) for k, v in self.memory]
        self._see(self.segments[1][sentences, 0])

    def _select(self, rows: Int[Tensor, " rows"]) -> None:
        self.past = [None if past is None else (past[0][rows], past[1][rows]) for past in self.past]

    def _see(self, segments: Int[Tensor, "b n"]) -> None:
        queries = torch.zeros_like(segments[:, :1]).expand(-1, self.beam)
        self.segments = queries[:, None], segments[:, None]


def _attention(layer: object) -> Attention:
    if not isinstance(layer, Attention):
        raise TypeError(f"layer: {type(layer).__name__}, expected attention to the prefix and to a memory in each.")
    return layer
