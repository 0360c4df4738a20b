"""Cross-entropy of tokens with tied embeddings; the forward pass also computes the gradients.

z           x Eᵀ, one row of V logits per token;  p = softmax(z)
loss        mean over wanted tokens t of  log Σ exp z − (1 − ε) z_t − ε z̄,   z̄ = x·Ē the mean logit
gradients   dz = p − (1 − ε) onehot(t) − ε / V;  the last term is the same for all of V, so it is applied separately:
            dx = s (p' E − ε Ē),  dE = p'ᵀ (s x) − (ε / V) Σ s x,   p' = p − (1 − ε) onehot(t),  s = 1 / count or 0

The logits are by far the largest tensor of a step. They and p are written once each, in the precision of x; torch's
cross-entropy in float32 makes about ten passes over them.
"""

from __future__ import annotations

import torch

from heedful.shapes import Float, Int, Tensor


def token_loss(
    x: Float[Tensor, "t d"], E: Float[Tensor, "v d"], wanted: Int[Tensor, " t"], smoothing: float, ignore: int
) -> Float[Tensor, ""]:
    """Mean cross-entropy of the target tokens with label smoothing, without tokens equal to `ignore`; in float32."""
    return _TokenLoss.apply(x, E, wanted, smoothing, ignore)


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, E, wanted, smoothing, ignore):
        wide = torch.promote_types(x.dtype, torch.float32)
        z = x @ E.mT
        at = wanted[:, None]
        of_wanted = z.gather(1, at).to(wide)
        p = z.softmax(-1)
        likely = p.gather(1, at).to(wide).clamp(min=torch.finfo(wide).tiny)
        mean_row = E.to(wide).mean(0)
        log_sum = of_wanted - likely.log()
        mean_logit = x.to(wide) @ mean_row[:, None]
        counts = (wanted != ignore)[:, None].to(wide)
        share = counts / counts.sum().clamp(min=1)
        loss = ((log_sum - (1 - smoothing) * of_wanted - smoothing * mean_logit) * share).sum()
        p.scatter_(1, at, (likely - (1 - smoothing)).to(p.dtype))
        scaled = x.to(wide) * share
        dx = ((p @ E).to(wide) - smoothing * mean_row) * share
        dE = (p.mT @ scaled.to(x.dtype)).to(wide) - smoothing / len(E) * scaled.sum(0)
        ctx.save_for_backward(dx.to(x.dtype), dE.to(E.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad):
        dx, dE = ctx.saved_tensors
        return dx * grad.to(dx.dtype), dE * grad.to(dE.dtype), None, None, None
