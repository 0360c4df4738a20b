"""2: what low rank looks like: redundant rows, mass near the diagonal, the singular values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch

from heedful.measures import energy_share, row_statistics, svdvals
from heedful.measures.spectrum import row_correlation
from heedful.mechanisms import Softmax
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory import models
from heedful.theory.chapters.bidirectional.heads import (
    LENGTH,
    TEXTS,
    Heads,
    as_trained,
    by_text,
    gaussian,
    rank_of,
)
from heedful.theory.claim import (
    Case,
    Claim,
    Evidence,
    Figure,
    Text,
    at_least,
    at_most,
    equal,
    evidence,
    surely_above,
)
from heedful.theory.models import random_like
from heedful.theory.samples import mean_and_error

if TYPE_CHECKING:
    from heedful.hf.calls import Call

# ── N004-redundant: different tokens attend to similar context


def rows_correlate(heads: Heads) -> Evidence:
    """Mean cosine of two rows in MiniLM, less that of random heads whose logits have the same spread."""
    own = by_text(lambda call, text: row_correlation(heads(call, text + 100)))
    base = by_text(lambda call, text: row_correlation(random_like(call, text)))
    mean, error = mean_and_error(own - base)
    return evidence(
        surely_above("mean cosine of two rows, less that of random heads", mean, 0.1, error=error),
        note=f"mean cosine {float(own.mean()):.3f}, random {float(base.mean()):.3f}; {TEXTS} texts, N = {LENGTH}",
    )


REDUNDANT = Claim(
    id="N004-redundant",
    section="2",
    kind="empirical",
    statement=Text(
        "Tokens at different positions attend to similar context, so that rows of the weights are strongly correlated.",
        "不同位置的 token 可能关注相似的上文/下文，导致注意力权重矩阵的行或列之间存在强相关性。",
    ),
    formula=r"\overline{\cos(a_i,a_j)}\quad(i\ne j)",
    check=rows_correlate,
    case=Case("heads of MiniLM", as_trained),
    control=Case("random heads of the same spread, another draw", random_like),
    first="empirical",
    reason=Text(
        "Held against random heads of the same spread, since flat rows are alike whatever they attend to (0.99 in an "
        "untrained copy). It is not special to bidirectional attention: see N004-causal-vs-bidir for SmolLM2.",
        "以 logits 标准差相同的随机头为基准，因为平坦的行总是彼此相似（未训练的副本为 0.99）。这并非双向注意力特有："
        "因果的 SmolLM2 也一样，见 N004-causal-vs-bidir。",
    ),
)


# ── N004-diag: mass near the diagonal lowers the rank


def band(width: float, n: int = 256) -> Tensor:
    """Softmax of −(i − j)²/2w²: weights fall off from the diagonal as a Gaussian of this width."""
    zeros = torch.zeros(n, 4, dtype=torch.float64)
    return Softmax(Full(), bias=lambda i, j: -(i - j).double().square() / (2 * width**2)).matrix(zeros, zeros)


def hub(width: float, n: int = 256) -> Tensor:
    """A random head on top of which every row attends to the first tokens, the more the smaller the width."""
    q, k = gaussian(n, 16, 1.0, 0)
    return Softmax(Full(), bias=lambda i, j: -j.double() / (2 * width) + 0 * i).matrix(q, k)


def narrower_is_lower(weights: Callable[[float], Tensor]) -> Evidence:
    """Effective rank as the mass is drawn together from width 32 to 0.5, N = 256; most weights are then nearly 0."""
    narrow, wide = weights(0.5), weights(32.0)
    return evidence(
        at_least("share of weights below 10⁻⁶, width 0.5", (narrow < 1e-6).double().mean(), 0.9),
        at_most("effective rank, width 0.5 against 32", rank_of(narrow), rank_of(wide)),
    )


def near_diagonal(call: Call) -> tuple[Tensor, Tensor]:
    """Mass within 2 tokens of the diagonal and effective rank of each head."""
    weights = call.operator()
    return row_statistics(weights, window=2).inside.mean(-1).flatten(), rank_of(weights).flatten()  # type: ignore[union-attr]


def rank_correlation(x: Tensor, y: Tensor) -> Tensor:
    """Spearman's ρ; equal values share their place."""
    places = [(z[:, None] > z).double().sum(-1) + (z[:, None] == z).double().sum(-1) / 2 for z in (x, y)]
    return torch.corrcoef(torch.stack(places))[0, 1]


@cache
def diagonal_correlation(text: int) -> Tensor:
    """Over the heads of MiniLM on one text."""
    mass, rank = zip(*map(near_diagonal, models.calls("minilm", LENGTH, text)), strict=True)
    return rank_correlation(torch.cat(mass), torch.cat(rank))


def rank_follows_width(sign: float) -> Evidence:
    """Effective rank 0.370 N/w of a Gaussian band, whose σ² over the circle are e^{−w²θ²}; and 72 heads of MiniLM.

    0.9 of a Gaussian of variance 1/2w² lies in |θ| < 1.163/w, a part 0.370/w of (−π, π). Ends and rounding up to whole
    ranks take a little more: 2 at most here.
    """
    n = 256
    found = [
        equal(f"effective rank, width {w:g}", rank_of(band(w)), 0.370 * n * w ** (-sign), within=2)
        for w in (1.0, 2.0, 4.0, 8.0)
    ]
    rho = torch.stack([diagonal_correlation(text) for text in range(TEXTS)])
    mean, error = mean_and_error(sign * rho)
    return evidence(
        *found,
        surely_above("MiniLM: rank correlation of mass near the diagonal and effective rank", mean, 0, error=error),
    )


def rank_of_bands() -> Figure:
    widths = [0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.7, 8.0, 11.0, 16.0, 23.0, 32.0]
    lines = {
        "Gaussian band, N = 256": (widths, [float(rank_of(band(w))) for w in widths]),
        "0.370 N/w": (widths[1:], [0.370 * 256 / w for w in widths[1:]]),
    }
    title = Text("The narrower the band, the higher the rank", "带越窄，秩越高")
    return Figure(title, "width of the band", "effective rank", lines, log_x=True, log_y=True)


DIAGONAL = Claim(
    id="N004-diag",
    section="2",
    kind="exact",
    statement=Text(
        "In long sequences most weights tend to 0 and what matters sits in few places, such as near the diagonal, "
        "which lowers the rank further.",
        "长序列中，大部分 token 之间的注意力权重可能趋近于 0，"
        "矩阵中有效信息集中在少数位置（例如对角线附近），进一步降低秩。",
    ),
    formula=r"w\downarrow\ \Rightarrow\ \operatorname{rank}A\downarrow",
    check=narrower_is_lower,
    case=Case("a band around the diagonal", band),
    control=Case("the first tokens, the same for all rows", hub),
    first="false",
    counterexample="""\
import torch, heedful as h
x = torch.arange(256.)
for w in (0.5, 1., 2., 8., 32.):                            # a band around the diagonal, from narrow to wide
    A = torch.softmax(-(x[:, None] - x) ** 2 / (2 * w * w), -1)
    print(w, h.effective_rank(A).estimate)                  # 209, 96, 48, 13, 4: the narrower, the higher""",
    corrected=Claim(
        id="N004-diag*",
        section="2",
        kind="empirical",
        statement=Text(
            "Mass near the diagonal raises the rank: a Gaussian band of width w has effective rank 0.370 N/w; and "
            "among the heads of MiniLM those with more mass near the diagonal have the higher rank. It falls where all "
            "rows share their few places.",
            "质量集中在对角线附近会提高秩：宽度为 w 的高斯带有效秩为 0.370 N/w；"
            "MiniLM 的头中，对角线附近质量越多，秩越高。只有当各行集中在相同的少数位置时，秩才下降。",
        ),
        formula=r"r_{0.9}\approx\frac{1.163}{\pi}\frac Nw",
        check=rank_follows_width,
        case=Case("N/w", 1.0),
        control=Case("N·w", -1.0),
    ),
    figure=rank_of_bands,
)


# ── N004-svd: most singular values are close to 0


def most_values_are_small(heads: Heads) -> Evidence:
    """The share of singular values below σ₁/10, and the energy in the first tenth of them."""

    def small(call: Call, text: int) -> Tensor:
        values = svdvals(heads(call, text))
        return (values < values[..., :1] / 10).double().mean(-1)

    few, few_error = mean_and_error(by_text(small))
    top, top_error = mean_and_error(by_text(lambda call, text: energy_share(heads(call, text), 0.1).estimate))
    return evidence(
        surely_above("share of singular values below σ₁/10", few, 0.75, error=few_error),
        surely_above("share of the energy in the first tenth", top, 0.8, error=top_error),
        note=f"{TEXTS} texts, N = {LENGTH}",
    )


def mean_spectra() -> Figure:
    places = [*range(0, 16), *range(16, LENGTH, 4)]
    lines = {}
    for name, heads, trained in (
        ("MiniLM", as_trained, True),
        ("random heads of the same spread", random_like, True),
        ("untrained copy", as_trained, False),
    ):
        values = torch.cat(
            [svdvals(heads(call, 0)).flatten(0, 1) for call in models.calls("minilm", LENGTH, 0, trained)]
        )
        mean = (values / values[:, :1]).mean(0)
        lines[name] = ([at + 1 for at in places], [float(mean[at]) for at in places])
    return Figure(
        Text("Mean σᵢ/σ₁ of 72 heads, N = 128", "72 个头的 σᵢ/σ₁ 均值（N = 128）"), "i", "σᵢ / σ₁", lines, log_y=True
    )


SVD = Claim(
    id="N004-svd",
    section="2",
    kind="empirical",
    statement=Text(
        "A singular value decomposition shows most singular values near 0 and only a few large ones.",
        "对注意力矩阵进行奇异值分解（SVD）时，会发现大部分奇异值接近于 0，仅有少数较大的奇异值。",
    ),
    check=most_values_are_small,
    case=Case("heads of MiniLM", as_trained),
    control=Case("random heads of the same spread", random_like),
    first="empirical",
    reason=Text(
        "Trained heads go beyond random ones of the same spread (0.88 of the values below σ₁/10 against 0.54). Part of "
        "it needs no training: rows sum to one, so σ₁ ≥ 1; in an untrained copy, whose attention is flat, it is 0.99.",
        "训练好的头明显超过同样标准差的随机头（0.88 对 0.54 的奇异值小于 σ₁/10）；"
        "其中一部分与训练无关：各行和为 1，故 σ₁ ≥ 1；未训练的副本注意力平坦，比例高达 0.99。",
    ),
    figure=mean_spectra,
)

CLAIMS = (REDUNDANT, DIAGONAL, SVD)
