"""torch's multi-head attention with any mechanism.

q, k, v     the input projections, split into heads; then, with add_bias_kv and add_zero_attn, a learned and a zero key
            and value
default     softmax(q kᵀ / √d + masks) v, by `Softmax`: masks are its bias, the causal mask is its pattern
mechanism   A(q, k) v, with the key padding mask as segments
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from heedful.core import Mechanism
from heedful.mechanisms import Softmax
from heedful.patterns import Causal, Full
from heedful.segments import Segments, from_mask
from heedful.shapes import Tensor
from heedful.words import check_takes_words


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with the same constructor, call, parameters and results, and a `mechanism`.

    >>> import torch, heedful as h
    >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> local = h.nn.MultiheadAttention(64, 4, batch_first=True, mechanism=h.Softmax(h.Window(8, 8)))
    >>> local.load_state_dict(layer.self_attn.state_dict())
    <All keys matched successfully>
    >>> layer.self_attn = local
    >>> layer(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])

    Without a mechanism it is exact softmax attention and accepts every mask that torch's accepts. With a mechanism:
      - key_padding_mask becomes segments.
      - attn_mask raises an error, except the causal mask (with is_causal=True) for a mechanism with a causal pattern.
      - add_bias_kv and add_zero_attn raise an error, because their keys have no position.

    Intended differences from torch:
      - A query without visible keys gets zero weights, so its output is out_proj's bias. torch returns NaN on some of
        its paths.
      - attn_mask determines the result. is_causal is a hint that attn_mask is the causal mask; if it is, the hint saves
        half the work. (torch uses the hint on some paths and the mask on others. The results differ if the hint is
        wrong and, with add_bias_kv or add_zero_attn, even if it is right.) Compiled code trusts the hint.
      - With a mechanism, the output of padded queries in self-attention is out_proj's bias: padding attends to nothing.

    need_weights=True (torch's default) and dropout > 0 in training materialise the n × m weights of `mechanism.matrix`:
    the returned weights, and the weights that dropout acts on, are those applied to the values. Otherwise the only
    tensors of this size are masks: a boolean attn_mask becomes a float mask, and an attn_mask with a key_padding_mask
    becomes one mask per batch entry.

    Why a subclass: parameters, their names, their initialisation and `isinstance` checks elsewhere are torch's by
    construction. The risk is that nn.TransformerEncoderLayer in eval mode reads the weights of its self_attn and calls
    a fused softmax, without calling self_attn at all. It does so only if `_qkv_same_embed_dim` is True, so here that is
    always False. nn.TransformerEncoder may still pass nested tensors to its layers, so this class accepts them.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        mechanism: Mechanism | None = None,
    ):
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        if mechanism is not None and not isinstance(mechanism, Mechanism):
            raise TypeError(
                f"mechanism: expected a Mechanism such as heedful.Softmax(), got {mechanism!r}. A name becomes one "
                "with heedful.build(name)."
            )
        if mechanism is not None and (add_bias_kv or add_zero_attn):
            raise ValueError(
                "mechanism: given with add_bias_kv or add_zero_attn, expected neither: the keys they append have no "
                "position, which patterns need. heedful.Softmax(sink=…) is what they are used for."
            )
        self.mechanism = mechanism

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False  # keeps nn.TransformerEncoderLayer off its fused path: see the class

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        words: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and weights (None unless requested), with torch's shapes.

        words   word ids of the keys, (batch, m) like key_padding_mask, for a mechanism with word-based heads
        """
        if words is not None:
            self._check_words(query, key, words, is_causal)
        if query.is_nested or key.is_nested or value.is_nested:
            return self._forward_nested(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        self._check(query, key, value, key_padding_mask, attn_mask, is_causal)
        batched = query.ndim == 3
        q, k, v = self._heads(query, key, value)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask[None]
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask.unflatten(0, (len(q), self.num_heads))
        segments: Segments | None = None
        if self.mechanism is None:
            n, m = q.shape[-2], k.shape[-2]
            k, v = self._with_extra_keys(k, self.bias_k), self._with_extra_keys(v, self.bias_v)
            mechanism: Mechanism = _softmax(n, m, k.shape[-2] - m, attn_mask, key_padding_mask, is_causal, q.dtype)
        else:
            mechanism = self.mechanism
            _check_masks_of(mechanism, attn_mask, is_causal)
            if key_padding_mask is not None:
                aligned = query is key or not isinstance(mechanism.pattern, Full)
                segments = _segments(key_padding_mask, q.shape[-2], aligned)
        weights, given = None, {} if words is None else {"words": words[..., None, :]}
        if need_weights or (self.training and self.dropout > 0):
            weights = F.dropout(mechanism.matrix(q, k, segments=segments, **given), self.dropout, self.training)
            out = weights @ v
        else:
            out = mechanism(q, k, v, segments=segments, **given)
        out = out.transpose(1, 2)
        out = out.transpose(0, 1) if batched and not self.batch_first else out
        out = self.out_proj(out.flatten(-2))
        if not need_weights or weights is None:
            return out if batched else out[0], None
        weights = weights.mean(1) if average_attn_weights else weights
        return (out, weights) if batched else (out[0], weights[0])

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the projected inputs, (batch, heads, tokens, head_dim)."""
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is None:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        else:
            weights = self.in_proj_weight.chunk(3)
        if query is key and key is value and self.in_proj_weight is not None:
            projected = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            projected = tuple(F.linear(*part) for part in zip((query, key, value), weights, biases, strict=True))
        if query.ndim == 2:
            projected = tuple(x.unsqueeze(0) for x in projected)
        elif not self.batch_first:
            projected = tuple(x.transpose(0, 1) for x in projected)
        return [x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in projected]

    def _with_extra_keys(self, x: Tensor, learned: Tensor | None) -> Tensor:
        """Append the learned token and the zero token, if the layer has them, to x (batch, heads, m, head_dim)."""
        rows = [] if learned is None else [learned.to(x.dtype).view(self.num_heads, 1, self.head_dim)]
        rows += [x.new_zeros(self.num_heads, 1, self.head_dim)] if self.add_zero_attn else []
        return torch.cat([x, *(row.expand(len(x), -1, -1, -1) for row in rows)], -2) if rows else x

    def _forward_nested(
        self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
    ):
        """Run on a nested tensor with rows of different lengths: nn.TransformerEncoder makes it of a padded batch."""
        if not (query is key and key is value and self.batch_first and query.layout == torch.strided):
            raise ValueError(
                "query: a nested tensor, expected one strided nested tensor as query, key and value, and "
                "batch_first=True. Likely cause: cross-attention between ragged batches: pad them and give "
                "key_padding_mask."
            )
        if key_padding_mask is not None or attn_mask is not None:
            raise ValueError("query: a nested tensor with a mask, expected no mask: the lengths say what is padding.")
        rows = query.unbind()
        lengths = [len(row) for row in rows]
        x = pad_sequence(rows, batch_first=True)
        hidden = torch.arange(x.shape[1], device=x.device) >= torch.tensor(lengths, device=x.device)[:, None]
        out, weights = self.forward(x, x, x, hidden, need_weights, None, average_attn_weights, is_causal)
        return torch.nested.as_nested_tensor([row[:n] for row, n in zip(out, lengths, strict=True)]), weights

    def _check(self, query, key, value, key_padding_mask, attn_mask, is_causal) -> None:
        given = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", (query, key, value), strict=True))
        if query.ndim not in (2, 3) or key.ndim != query.ndim or value.ndim != query.ndim:
            raise ValueError(f"query, key, value: {given}, expected 3 axes each, or 2 each without a batch.")
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if x.shape[-1] != width:
                raise ValueError(
                    f"{name}: shape {tuple(x.shape)}, expected a width of {width}. Likely cause: kdim or vdim was not "
                    "given to the constructor, or this is another layer's input."
                )
        tokens, batch = (1, 0) if query.ndim == 3 and self.batch_first else (0, 1)
        lone = query.ndim == 2
        if key.shape[:-1] != value.shape[:-1] or not (lone or query.shape[batch] == key.shape[batch]):
            order = "(batch, tokens, width)" if self.batch_first else "(tokens, batch, width)"
            raise ValueError(
                f"query, key, value: {given}, expected one batch size, and as many values as keys. Likely cause: this "
                f"layer has batch_first={self.batch_first}, so it takes {order}."
            )
        n, m, size = query.shape[tokens], key.shape[tokens], 1 if lone else query.shape[batch]
        _check_mask("key_padding_mask", key_padding_mask, [(m,) if lone else (size, m)])
        _check_mask("attn_mask", attn_mask, [(n, m), (size * self.num_heads, n, m)])
        if is_causal and attn_mask is None and self.mechanism is None:
            raise RuntimeError(
                "is_causal: True without attn_mask, expected the mask too, as torch does: is_causal is a hint that "
                "attn_mask is causal. nn.Transformer.generate_square_subsequent_mask(n) makes one; mechanism="
                "heedful.Softmax(heedful.Causal()) needs none."
            )

    def _check_words(self, query: Tensor, key: Tensor, words: Tensor, is_causal: bool) -> None:
        if self.mechanism is None:
            raise TypeError("words: given without a mechanism, expected one with word-based heads: FixedPattern.")
        check_takes_words(self.mechanism)
        if query.is_nested or is_causal:
            what = "a nested query" if query.is_nested else "is_causal=True"
            raise ValueError(
                f"words: given with {what}, expected a padded batch and is_causal=False: word-based heads see whole "
                "words, their later tokens too."
            )
        wanted = tuple(key.shape[:-1]) if self.batch_first or key.ndim == 2 else (key.shape[1], key.shape[0])
        if not isinstance(words, Tensor) or tuple(words.shape) != wanted:
            given = f"shape {tuple(words.shape)}" if isinstance(words, Tensor) else type(words).__name__
            raise ValueError(f"words: {given}, expected an integer tensor {wanted}, one id for each key.")

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, batch_first={self.batch_first}"


def _softmax(
    n: int,
    m: int,
    extra: int,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    dtype: torch.dtype,
) -> Softmax:
    """Return softmax attention under torch's masks, for n queries, m keys and `extra` final keys that no mask hides.

    The padding mask becomes a bias (batch, 1, 1, m), not segments: torch's padding hides keys but does not change
    positions or padded queries, and with a bias the whole batch runs in one tile.
    """
    causal = is_causal and attn_mask is not None and n == m and not extra and _is_causal(attn_mask)
    masks = [None if causal else attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None]]
    biases = [F.pad(_as_bias(mask, dtype), (0, extra)) for mask in masks if mask is not None]
    return Softmax(Causal() if causal else Full(), bias=sum(biases[1:], biases[0]) if biases else None)


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)
    return mask.to(dtype)


def _is_causal(mask: Tensor) -> bool:
    """True if a mask hides exactly the later keys; compared in blocks of rows, to avoid large temporaries."""
    if torch.compiler.is_compiling():
        return True
    n = mask.shape[-1]
    index = torch.arange(n, device=mask.device)
    for rows, i in zip(mask.split(256, -2), index.split(256), strict=True):
        later = index > i[:, None]
        right = rows == later if mask.dtype == torch.bool else torch.where(later, rows == -torch.inf, rows == 0)
        if not right.all():
            return False
    return True


def _segments(key_padding_mask: Tensor, n: int, aligned: bool) -> Segments:
    """Return the segments of a padding mask; `aligned` is True if queries and keys are one sequence."""
    hidden = key_padding_mask
    if hidden.dtype != torch.bool:
        hidden = hidden == -torch.inf
        if not (hidden | (key_padding_mask == 0)).all():
            raise ValueError(
                "key_padding_mask: a float mask with values besides 0 and -inf, expected padding only: a mechanism "
                "other than the default takes no scores from outside."
            )
    ids = from_mask(~hidden)[:, None]
    return ids if aligned else (ids.new_zeros(len(ids), 1, n), ids)


def _check_masks_of(mechanism: Mechanism, attn_mask: Tensor | None, is_causal: bool) -> None:
    """Raise unless the mechanism's pattern already is the one that the masks describe."""
    if is_causal and not mechanism.pattern.is_causal:
        raise ValueError(
            f"is_causal: True, but {mechanism!r} lets queries see later keys. Expected a mechanism with a causal "
            "pattern, such as heedful.Softmax(heedful.Causal())."
        )
    if attn_mask is None:
        return
    square = attn_mask.shape[-2] == attn_mask.shape[-1]
    if not (is_causal and square and _is_causal(attn_mask)):
        raise ValueError(
            f"attn_mask: given to {mechanism!r}, whose pattern says who attends to whom; expected None, or the causal "
            "mask together with is_causal=True. For an arbitrary mask leave out `mechanism`."
        )


def _check_mask(name: str, mask: Tensor | None, shapes: list[tuple[int, ...]]) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"{name}: {mask.dtype}, expected bool (True: may not be attended to) or a float to be added to the scores."
        )
    if tuple(mask.shape) not in shapes:
        wanted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(
            f"{name}: shape {tuple(mask.shape)}, expected {wanted}. Likely cause: queries and keys swapped, or a "
            "missing factor of num_heads."
        )
