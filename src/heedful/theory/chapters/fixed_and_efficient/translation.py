"""1.3: what translation experiments say of fixed heads. Only training decides it: the study raganato."""

from __future__ import annotations

from heedful.theory.claim import Case, Claim, Evidence, Text, Undecided

TABLE = {"8L": (40.5, 38.2), "7F_token+1L": (40.4, 38.1), "7F_word+1L": (40.3, 38.0), "1L": (39.1, 37.0)}
PUBLISHED = {"DE-EN, 159K": (30.86, 32.95), "EN-VI, 133K": (29.85, 31.05), "VI-EN, 133K": (26.15, 29.16)}
STUDY = "decided by the study raganato, which has not run"

SETUP = Claim(
    id="R003-setup",
    section="1.3.1",
    kind="wording",
    statement=Text(
        "The paper's experiments: 2.9 million pairs of WMT19 German-English; subsets of 5K to 165K pairs; German and "
        "Vietnamese with English.",
        "论文实验：290 万句对的 WMT19 德英翻译；5K–165K 句对的低资源子集；德↔英、越↔英。",
    ),
    first="empirical",
    reason=Text(
        "It says what others did: a matter of reading their paper (arXiv:2002.10260), not of computing.",
        "陈述的是他人做了什么：应查阅原论文（arXiv:2002.10260），无可计算。",
    ),
)


def table_by_training(_: None) -> Evidence:
    """What follows from the table is computed; whether training gives it is not known here."""
    fixed = [TABLE[name][pair] for name in ("7F_token+1L", "7F_word+1L") for pair in (0, 1)]
    full, single = ([TABLE[name][pair] for _ in range(2) for pair in (0, 1)] for name in ("8L", "1L"))
    lost, won = (max(abs(a - b) for a, b in zip(fixed, other, strict=True)) for other in (full, single))
    least = min(a - b for a, b in zip(fixed, single, strict=True))
    raise Undecided(
        f"{STUDY}; the table agrees with its own conclusions: fixed heads are at most {lost:.1f} BLEU from eight "
        f"learned ones, and {least:.1f} to {won:.1f} above a single one"
    )


BLEU_TABLE = Claim(
    id="R003-BLEU-table",
    section="1.3.2",
    kind="empirical",
    statement=Text(
        "BLEU de→en / en→de: eight learned heads 40.5/38.2, seven fixed and one learned 40.4/38.1 (tokens) and "
        "40.3/38.0 (words), a single learned head 39.1/37.0.",
        "BLEU（德→英/英→德）：8L 40.5/38.2；7F_token+1L 40.4/38.1；7F_word+1L 40.3/38.0；1L 39.1/37.0。",
    ),
    check=table_by_training,
    control=Case("eight learned heads"),
    first="empirical",
    reason=Text(
        "Needs training of 8L, 7F+1L and 1L with several seeds: the study raganato. Only the arithmetic is checked.",
        "需要以多个随机种子训练 8L、7F+1L 与 1L：研究 raganato。此处只核对了表内算术。",
    ),
)


def three_points_by_training(_: None) -> Evidence:
    gains = {name: after - before for name, (before, after) in PUBLISHED.items()}
    said = ", ".join(f"{name} {gain:+.2f}" for name, gain in gains.items())
    raise Undecided(f"{STUDY}; the gains that the paper reports ({said}) make 3 points the largest, not the usual one")


BLEU_3 = Claim(
    id="R003-BLEU-3",
    section="1.3.2, 5.1",
    kind="empirical",
    statement=Text(
        "With little training data fixed patterns raise BLEU by up to 3 points (table 4.4 writes +3).",
        "在低资源场景下，固定注意力模型提升 BLEU 达 3 个点（4.4 的表写作 +3 BLEU）。",
    ),
    check=three_points_by_training,
    control=Case("eight learned heads"),
    first="empirical",
    reason=Text(
        "Needs training on little data with several seeds: the study raganato. “Up to 3” is the largest gain reported.",
        "需要在小数据上以多个种子训练：研究 raganato。“达 3”是所报告的最大增益。",
    ),
)


def reasons_by_training(_: None) -> Evidence:
    raise Undecided(f"{STUDY}: the gap between training and validation loss with fixed and with learned heads")


WHY = Claim(
    id="R003-why",
    section="1.3.3",
    kind="empirical",
    statement=Text(
        "Fixed heads help with little data because they overfit less, generalise better, give stabler gradients and "
        "spend parameters where learning is needed.",
        "固定注意力在低资源下更好的原因：减少过拟合、更好的泛化、更稳定的梯度、参数效率。",
    ),
    check=reasons_by_training,
    control=Case("eight learned heads"),
    first="empirical",
    reason=Text(
        "That there are fewer parameters is R003-noparam; the rest needs training: the study raganato.",
        "参数更少见 R003-noparam；其余需要训练：研究 raganato。",
    ),
)

CLAIMS = (SETUP, BLEU_TABLE, BLEU_3, WHY)
