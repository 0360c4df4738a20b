"""Softmax attention (Vaswani et al. 2017, arXiv:1706.03762), exact, over any pattern.

matrix      A_ij = exp(z_ij / T) / (exp(sink / T) + Σ_{l visible} exp(z_il / T)),  j visible from i
            z_ij = cap · tanh(scale · q_i·k_j / cap) + bias_ij
fast        the kernel for what the pattern is: torch's fused one (dense, causal), residue classes (strided, dilated;
            merged with a window), lists of neighbours (trees); else Triton's over intervals or lists, or tiles
recurrence  a cache of the keys and values that later queries may see
cost        2 · pairs · (d + e) flops, state (d + e) · remembered keys
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.kernels.dispatch import as_given, asked_for
from heedful.kernels.softmax import softmax, softmax_adjoint, softmax_products
from heedful.mechanisms.score_base import ScoreBase
from heedful.operator import Products
from heedful.patterns import Causal, Pattern
from heedful.segments import resolve, visible
from heedful.shapes import Float, Tensor
from heedful.validation import check_inputs, finite_is_required


class Softmax(ScoreBase):
    """Exact softmax attention.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 1, 8, 4096, 64).unbind()
    >>> h.Softmax(h.Window(512, sinks=4))(q, k, v).shape
    torch.Size([1, 8, 4096, 64])

    Half of the Sparse Transformer, N²/128 pairs, and tokens within two edges in a syntax tree:

    >>> strided = h.Softmax((h.Strided(128) | h.Window(127)) & h.Causal())
    >>> strided.explain(q, k, v).splitlines()[-1]
    '→ strided-window'
    >>> heads = (1, -1, 4, 4, 1)  # "dogs chase the small cat": chase is the root, cat its child, the and small cat's
    >>> (h.Softmax(h.Tree(heads, radius=1)).matrix(q[..., :5, :], k[..., :5, :])[0, 0, 2] > 0).tolist()
    [False, False, True, False, True]

    scale         factor of q·k; d^-½ by default
    temperature   divides the logits; the larger, the flatter
    bias          added to the scores: a tensor that broadcasts to (*batch, n, m), or a function of query positions
                  (…, r, 1) and key positions (…, c); a function with parameters must be an nn.Module
    softcap       bounds the scores by cap · tanh(score / cap), as in Gemma 2
    sink          a learned logit, one for each head, that takes mass and gives nothing, as in gpt-oss
    """

    kernel = softmax
    adjoint_kernel = softmax_adjoint
    bias: Tensor | None
    sink: Tensor | None

    def __init__(
        self,
        pattern: Pattern = Causal(),  # noqa: B008  (frozen)
        scale: float | None = None,
        temperature: float = 1.0,
        *,
        bias: Float[Tensor, "*#b #n #m"] | Callable[[Tensor, Tensor], Tensor] | None = None,
        softcap: float | None = None,
        sink: Float[Tensor, "*#b"] | None = None,
    ):
        super().__init__(pattern, scale)
        if not temperature > 0:
            raise ValueError(f"temperature: expected > 0, got {temperature}. For hard attention use a small one.")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap: expected > 0 or None, got {softcap}.")
        self.temperature = temperature
        self.softcap = softcap
        self.bias_function = None if bias is None or isinstance(bias, Tensor) else bias
        self._hold("bias", bias if isinstance(bias, Tensor) else None)
        self._hold("sink", sink)

    def _hold(self, name: str, value: Tensor | None) -> None:
        """A parameter stays a parameter; any other tensor is a buffer; both travel with the module."""
        if isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
        else:
            self.register_buffer(name, value)

    def score_scale(self, d: int) -> float:
        return super().score_scale(d) / self.temperature

    def rows(self) -> SoftmaxRows:
        heat = self.temperature
        return SoftmaxRows(
            bias=self.bias if self.bias is None or heat == 1 else self.bias / heat,
            bias_function=self.bias_function,
            softcap=None if self.softcap is None else self.softcap / heat,
            sink=self.sink,
            temperature=heat,
        )

    def float32_products(self, q, k, *, segments=None):
        inputs = q, k, self.rows(), self.pattern, segments, self.score_scale(q.shape[-1])
        raised = cache(lambda: super(Softmax, self).float32_products(q, k, segments=segments))
        if softmax_products.refuses("triton", *inputs):
            return raised()
        here = softmax_products(*inputs)
        learned = any(x is not None and x.requires_grad for x in (q, k, self.sink))

        def elsewhere() -> bool:
            return finite_is_required() or asked_for() not in (None, "triton")

        def either(fast: Callable[[Tensor], Tensor], slow: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def product(x: Tensor) -> Tensor:
                learns = (learned or x.requires_grad) and torch.is_grad_enabled()
                return slow(x) if learns or elsewhere() else fast(x)

            return product

        return Products(
            either(here.apply, lambda x: raised().apply(x)),
            either(here.adjoint, lambda y: raised().adjoint(y)),
            fused=not elsewhere(),
        )

    def matrix(self, q, k, *, segments=None):
        check_inputs(q, k, segments=segments, pattern=self.pattern, mechanism=self)
        n, m = q.shape[-2], k.shape[-2]
        with as_given(q):
            z = q @ k.mT * super().score_scale(q.shape[-1])
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        if self.bias is not None:
            z = z + self.bias.to(z.dtype)
        if self.bias_function is not None:
            layout = resolve(segments, n, m, q.device)
            bias = self.bias_function(layout.query_positions[..., None], layout.key_positions[..., None, :])
            z = z + bias.to(z.dtype)
        z = (z / self.temperature).masked_fill(~visible(self.pattern, n, m, segments, q.device), -torch.inf)
        if m == 0:
            return z
        top = z.amax(-1, keepdim=True)
        rest = torch.zeros_like(top)
        if self.sink is not None:
            sink = self.sink[..., None, None].to(z.dtype) / self.temperature
            top = torch.maximum(top, sink)
            rest = (sink - top).exp()
        weights = (z - top.masked_fill(top == -torch.inf, 0)).exp()
        total = weights.sum(-1, keepdim=True) + rest
        return weights / total.masked_fill(total == 0, 1)

    def extra_repr(self) -> str:
        parts = [repr(self.pattern)]
        parts += [f"{name}={value}" for name in ("scale", "softcap") if (value := getattr(self, name)) is not None]
        if self.temperature != 1:
            parts.append(f"temperature={self.temperature}")
        parts += [name for name in ("bias", "sink") if getattr(self, name) is not None]
        return ", ".join(parts)
