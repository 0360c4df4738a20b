"""The texts on the page of a study, in English and in Chinese."""

from __future__ import annotations

from typing import NamedTuple

from heedful.studies import fixed_heads, frozen_projections

Said = dict[str, str]


class Texts(NamedTuple):
    """The title, the question, the prediction written before the first run, and what the runs show."""

    title: Said
    question: Said
    prediction: Said
    shows: Said


def _one_line(text: str) -> str:
    return " ".join(text.split())


TEXTS: dict[str, Texts] = {
    "fixed-heads": Texts(
        title={"en": "Fixed heads in the encoder", "zh": "编码器中的固定注意力头"},
        question={
            "en": fixed_heads.QUESTION,
            "zh": "在 5,000 与 20,000 句对上，编码器中的固定头如何改变 BLEU 以及与训练损失的差距？",
        },
        prediction={
            "en": _one_line(fixed_heads.PREDICTION),
            "zh": (
                "写于首次运行之前。5,000 句对时 7F(token)+1L 高于 8L 0.5 至 2 BLEU，20,000 句对时高 0 至 1；"
                "按词与按词元的固定头相差不超过 0.5；8F 与 7F+1L 相差不超过 1；20,000 句对时 1L 低于 8L 0.5 至 2。"
                "固定头使训练与测试损失之差变小，但不到十分之一；训练初期梯度范数波动更小，末期没有差别；"
                "在未见过的软件包上，这一切都更小。"
            ),
        },
        shows={
            "en": _one_line("""
Fixed heads raise BLEU far more than predicted, by about the same amount at both sizes. A likely reason lies in the
baseline: its learned encoder heads have found no neighbours by the end of training. In the runs of seed 0 no head of 8L
puts more than a fifth of its weight on the previous or on the next token, and one learned head does at least as well
as eight. So the gap may say more of what short training from sinusoidal positions does not learn than of fixed heads.
Rotary positions and longer training would tell; they have not run yet. Eight fixed heads are as good as seven and a
learned one. Heads that count words are below those that count tokens. Gradient norms vary more with fixed heads at the
end of training, not less."""),
            "zh": (
                "固定头带来的 BLEU 提升远大于预测，且在两种规模上大致相同。一个可能的原因在于基线："
                "训练结束时，可学习的编码器头仍未学会关注相邻词。在种子 0 的运行中，"
                "8L 没有一个头把超过五分之一的权重放在前一个或后一个词元上，而一个可学习头至少与八个一样好。"
                "因此，这一差距更可能反映短训练从正弦位置编码中学不到什么，而未必是固定头本身的优势。"
                "旋转位置编码与更长训练的对照可以回答这一点，但尚未运行。"
                "八个固定头与“七个固定加一个可学习”同样好；按词计数的固定头低于按词元计数的。"
                "训练末期，固定头的梯度范数波动更大而非更小。"
            ),
        },
    ),
    "frozen-projections": Texts(
        title={"en": "Random projections that never learn", "zh": "从不训练的随机投影"},
        question={
            "en": frozen_projections.QUESTION,
            "zh": "在 5,000 与 20,000 句对上，冻结 Q 与 K 会损失多少 BLEU？正交性是否重要？",
        },
        prediction={
            "en": _one_line(frozen_projections.PREDICTION),
            "zh": (
                "写于首次运行之前。冻结的正交 Q、K 在 20,000 句对时损失 0.5 至 3 BLEU，5,000 句对时更少，"
                "至多与可学习的持平；"
                "损失主要来自交叉注意力。高斯、Hadamard、逐头与全局正交投影彼此相差不超过 0.5 BLEU；"
                "八个头中冻结四个损失不到 0.5；正交初始化后再训练等同于可学习投影；秩为 8 的 LoRA 能挽回大部分损失；"
                "再冻结 V 约再损失 1；线性与 FAVOR+ 注意力无论投影是否学习都低于 softmax。"
            ),
        },
        shows={
            "en": _one_line("""
Freezing Q and K in all attention costs half of BLEU at 5,000 pairs and about a quarter at 20,000, where two seeds
have run: more than predicted. That fills the open cell of table 4.4: orthogonal random attention is far below the
baseline with few pairs. Orthogonal, Gaussian and Hadamard projections lose the same within what three seeds can show.
A LoRA of rank 8 wins back about half. Four frozen heads of eight cost nothing that three seeds can show. An
orthogonal start that is trained is slightly above the usual one. Linear attention with frozen projections in self-
attention, and learned attention to the source, is not below the baseline in its one seed: the loss may lie in cross-
attention, which was not frozen alone. The baseline is the 8L of the study of fixed heads, with its weakness."""),
            "zh": (
                "在所有注意力中冻结 Q 与 K，5,000 句对时损失一半 BLEU，20,000 句对时约损失四分之一（两个种子），"
                "大于预测。"
                "这填上了 4.4 节表中的空格：小数据下正交随机注意力远低于基线。"
                "正交、高斯与 Hadamard 投影的损失相同，三个种子看不出差别。秩为 8 的 LoRA 挽回约一半。"
                "八个头中冻结四个，三个种子看不出损失。正交初始化后再训练略高于通常的初始化。"
                "自注意力使用冻结投影的线性注意力、而对源句的注意力仍可学习时，唯一的一个种子并不低于基线："
                "损失可能在交叉注意力，但尚未单独冻结它来验证。基线即固定头研究中的 8L，其弱点也在此。"
            ),
        },
    ),
}
