"""5.1.2: the formula Softmax(QKᵀ/√d_k) V."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import sqrt
from typing import NamedTuple

import torch

from heedful.core import Mechanism
from heedful.mechanisms import Softmax
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory.chapters.scaled_dot_product.common import EPS, layer, scores
from heedful.theory.claim import Case, Claim, Evidence, Text, at_least, at_most, equal, evidence
from heedful.theory.models import calls, model
from heedful.theory.samples import normal, seeded

# ── E5.1.1: Attention(Q, K, V) = Softmax(QKᵀ/√d_k) V


def follows_the_formula(attend: Mechanism) -> Evidence:
    """The fast path against the formula; each output an average of the values, and permuted with the tokens."""
    n, d_k, d_v = 33, 16, 5
    q, k = normal(2, n, d_k, seed=0).unbind()
    v = normal(n, d_v, seed=1)
    out, weights = attend(q, k, v), attend.matrix(q, k)
    order = torch.randperm(n, generator=seeded(2))
    by_formula = torch.softmax(q @ k.mT / sqrt(d_k), -1) @ v
    rounding = 4 * (n + d_k) * EPS * float(v.abs().max())  # of sums of n and of d_k terms
    return evidence(
        equal("rows", out.shape[0], n),
        equal("columns", out.shape[1], d_v),
        at_most("distance from the formula", (out - by_formula).abs().max(), rounding),
        at_least("smallest weight", weights.min(), 0),
        equal("sum of a row", weights.sum(-1).max(), 1, within=n * EPS),
        at_most("largest output − largest value", (out.amax(0) - v.amax(0)).max(), rounding),
        at_most(
            "change under a permutation", (attend(q[order], k[order], v[order]) - out[order]).abs().max(), rounding
        ),
    )


E5_1_1 = Claim(
    id="E5.1.1",
    section="5.1.2",
    kind="exact",
    statement=Text(
        "Attention(Q, K, V) = Softmax(QKᵀ/√d_k) V, with an output of shape n × d_v.",
        "Attention(Q, K, V) = Softmax(QKᵀ/√d_k)V，输出为 n × d_v 矩阵。",
    ),
    formula=r"\operatorname{Attention}(Q,K,V)=\operatorname{Softmax}\left(\frac{QK^\top}{\sqrt{d_k}}\right)V",
    check=follows_the_formula,
    case=Case("Softmax(Full())", Softmax(Full())),
    control=Case("scores divided by d_k, not by its root", Softmax(Full(), scale=1 / 16)),
)


# ── E5.1.1-dk: how wide queries and keys are in practice


class Widths(NamedTuple):
    name: str
    key: int
    value: int
    hidden: int
    heads: int


def of_trained_models() -> Iterator[Widths]:
    for name in ("minilm", "smollm2"):
        call, hidden = calls(name, 8)[0], model(name, True)[0].config.hidden_size
        yield Widths(name, call.q.shape[-1], call.v.shape[-1], hidden, call.q.shape[1])


def of_one_head() -> Iterator[Widths]:
    attention = layer(384, seed=0)
    yield Widths("one head", attention.head_dim, attention.value_dim, attention.embed_dim, attention.heads)


def as_wide_as_the_model(widths: Callable[[], Iterator[Widths]]) -> Evidence:
    found = list(widths())
    return evidence(
        *(equal(f"d_k of {one.name}", one.key, one.hidden) for one in found),
        *(equal(f"d_v of {one.name}", one.value, one.hidden) for one in found),
    )


def share_of_a_head(heads: Callable[[Widths], int]) -> Evidence:
    """d_k = d_v = d / h in trained models, and by default in a layer of as many heads."""
    found = list(of_trained_models())
    return evidence(
        *(equal(f"d_k of {one.name}", one.key, one.hidden // heads(one)) for one in found),
        *(equal(f"d_v of {one.name}", one.value, one.hidden // heads(one)) for one in found),
        *(equal(f"a layer like {one.name}", layer(one.hidden, 0, heads=one.heads).head_dim, one.key) for one in found),
    )


E5_1_1_DK = Claim(
    id="E5.1.1-dk",
    section="5.1.2",
    kind="empirical",
    statement=Text(
        "In practice usually d_k = d_v = d, the hidden dimension of the model.",
        "在实践中通常有 d_k = d_v = d，其中 d 是模型的隐藏维度。",
    ),
    formula=r"d_k=d_v=d",
    check=as_wide_as_the_model,
    case=Case("MiniLM and SmolLM2", of_trained_models),
    control=Case("a layer of one head", of_one_head),
    first="conditional",
    counterexample="""\
from heedful.theory.models import calls, model
for name in ("minilm", "smollm2"):
    q = calls(name, 8)[0].q                                 # (batch, heads, tokens, d_k)
    print(name, model(name, True)[0].config.hidden_size, q.shape)
# d = 384 and 12 heads of d_k = 32; d = 576 and 9 heads of d_k = 64""",
    corrected=Claim(
        id="E5.1.1-dk*",
        section="5.1.2",
        kind="empirical",
        statement=Text(
            "With h heads d_k = d_v = d/h, as 5.1.3 says too; d_k = d is the case of a single head.",
            "多头时 d_k = d_v = d/h（5.1.3 也这样说）；d_k = d 只是单头的情形。",
        ),
        formula=r"d_k=d_v=\frac{d}{h}",
        check=share_of_a_head,
        case=Case("d / h", lambda widths: widths.heads),
        control=Case("one head less", lambda widths: widths.heads - 1),
    ),
    reason=Text(
        "The sentence is about practice, and both models looked at contradict it; it holds for a single head only.",
        "这句话讲的是实践，而所检查的两个模型都不符合；它只对单头成立。",
    ),
)


# ── E5.1.1-cos: the dot product of unit vectors


def cosine_of_the_angle(prepare: Callable[[Tensor], Tensor]) -> Evidence:
    """u·v against cos 2 atan2(‖u − v‖, ‖u + v‖), the angle of the directions by lengths alone."""
    x, y = normal(2, 40, 16, seed=0).unbind()
    apart = torch.linalg.vector_norm(unit(x)[:, None] - unit(y), dim=-1)
    together = torch.linalg.vector_norm(unit(x)[:, None] + unit(y), dim=-1)
    angle = 2 * torch.atan2(apart, together)
    return evidence(
        at_most("largest |u·v − cos θ|", (scores(prepare(x), prepare(y)) - angle.cos()).abs().max(), 32 * EPS)
    )


def unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def as_given(x: Tensor) -> Tensor:
    return x


E5_1_1_COS = Claim(
    id="E5.1.1-cos",
    section="5.1.2",
    kind="exact",
    statement=Text(
        "For unit vectors the dot product is the cosine of their angle.",
        "对于两个单位向量，点积等于它们之间夹角的余弦值。",
    ),
    formula=r"u\cdot v=\cos\angle(u,v)=1-\tfrac12\|u-v\|^2\quad(\|u\|=\|v\|=1)",
    check=cosine_of_the_angle,
    case=Case("unit vectors", unit),
    control=Case("vectors of any length", as_given),
)

CLAIMS = (E5_1_1, E5_1_1_DK, E5_1_1_COS)
