"""The sentences of an answer, in English and Chinese; `answer` fills in the numbers."""

from __future__ import annotations

THIN = "\u202f"  # narrow no-break space
Phrases = dict[str, str]

ENGLISH: Phrases = {
    "space": " ",
    "colon": ": ",
    "comma": ", ",
    "and": " and ",
    "one positional": "follows a fixed pattern",
    "one sink": "rests on the first token",
    "one low rank": "has a rank below half of a random head’s",
    "one content": "follows content",
    "some positional": "follow a fixed pattern",
    "some sink": "rest on the first token",
    "some low rank": "have a rank below half of a random head’s",
    "some content": "follow content",
    "lead one": "At {length} tokens its one attention head {kind}.",
    "lead": "At {length} tokens, {kinds}.",
    "lead first": "{count} of its {total} attention heads {phrase}",
    "lead next": "{count} {phrase}",
    "one head": "1 head",
    "heads": "{count} heads",
    "text": "Measured on 1 text of {length} tokens, so there are no intervals over texts.",
    "texts": f"Measured on {{texts}} texts of {{length}} tokens; 95{THIN}% intervals come from resampling the texts.",
    "rank means": (
        f"The effective rank of a head is the number of singular values of its attention matrix that hold 90{THIN}% of "
        "the matrix’s energy, the sum of its squared weights."
    ),
    "rank": "Its mean over heads is {rank} of {length}{range}{certainty}{beside}.",
    "range": f" (95{THIN}% interval {{low}} to {{high}})",
    "exact": ", and every rank is exact",
    "tight": ", and certified to the digits shown",
    "certified": ", certified to lie between {low} and {high} on these texts",
    "beside": (
        "; for random heads, with noise for queries and keys and logits (the scores before the softmax) that vary as "
        "much, it is {base}"
    ),
    "nothing beside": "; no random head was measured beside it, so none is called low rank",
    "depth": "In the first third of the layers it is {first}, in the last third {last}.",
    "growth": "From {shortest} to {longest} tokens (N) it grows as N^{power}{range}{random}.",
    "random growth": ", for random heads as N^{power}",
    "precise": (
        f"The interval is ±{THIN}{{reached}}{THIN}% of the mean: the precision that was asked for, "
        f"±{THIN}{{asked}}{THIN}%, was reached with {{texts}} of {{planned}} texts."
    ),
    "not precise": (
        f"The precision that was asked for, ±{THIN}{{asked}}{THIN}% of the mean, was not reached: at {{length}} tokens "
        f"the interval is ±{THIN}{{reached}}{THIN}%, with {{texts}} of {{planned}} texts measured. {{remedy}}"
    ),
    "too few": (
        f"The precision that was asked for, ±{THIN}{{asked}}{THIN}% of the mean, was not reached: that takes "
        "{fewest} texts at least, and {texts} of {planned} were measured. {remedy}"
    ),
    "more texts": "Give more texts.",
    "resume": "Resume the scan.",
    "items": (
        "The model attends in several items for one input (windows, channels or frames; up to {items}): every number "
        "of a head is the mean over them."
    ),
    "unfinished": "{texts} of {planned} texts have been measured so far. Resume the scan for the rest.",
    "positional": (
        f"{{heads}} with a fixed pattern (an offset, a window, all tokens alike): it explains {{percent}}{THIN}% of "
        "the head on average. A fixed pattern needs no queries and keys."
    ),
    "sink": (
        f"{{heads}} on the first token: the first four tokens hold {{percent}}{THIN}% of the weight of later queries "
        f"on average. Those and a window leave out {{rest}}{THIN}% at most."
    ),
    "low rank": (
        f"{{heads}} of low rank, {{rank}} on average: two factors of that rank have {{percent}}{THIN}% as many numbers "
        "as the matrix. Low-rank or linear attention is the candidate."
    ),
    "not low enough": "{heads} of low rank, {rank} on average, which is not low enough to pay at {length} tokens.",
    "content": "{heads} by content: no replacement is suggested.",
    "caveat": (
        "These are candidates: the measures are of the weights. What a replacement does to the model’s loss has to be "
        "measured too."
    ),
    "pair lead": (
        "On the same {texts} texts of {length} tokens, {down} of {all} heads have a lower effective rank in {a} than "
        f"in {{b}} and {{up}} a higher one; for {{flat}} the 95{THIN}% interval of the difference includes 0."
    ),
    "pair lead one": (
        "On the same text of {length} tokens, {down} of {all} heads have a lower effective rank in {a} than in {b}, "
        "{up} a higher one and {flat} the same. One text gives no intervals."
    ),
    "unpaired lead": (
        "The effective rank is {rank} on average over heads in {a} and {other} in {b}. The two scans share no text at "
        "a common length, so there are no paired differences."
    ),
    "pair rank": "Its mean over heads is {rank} in {a} and {other} in {b}, a difference of {difference}{range}.",
    "pair range": f" (95{THIN}% interval {{low}} to {{high}}, paired text by text)",
    "pair kinds": "{changed} of {all} heads are of another kind.",
    "pair delta": (
        "The attention matrices differ by ΔA, whose norm is {relative} of the norm of A on average over heads; equal "
        "matrices have 0."
    ),
    "pair growth": (
        "From {shortest} to {longest} tokens (N) the mean rank grows as N^{power} in {a} and as N^{other} in {b}."
    ),
    "pair positional": "Fixed pattern: {count} heads in {a}, {other} in {b}.",
    "pair sink": "First token: {count} heads in {a}, {other} in {b}.",
    "pair low rank": "Low rank: {count} heads in {a}, {other} in {b}.",
    "pair content": "Content: {count} heads in {a}, {other} in {b}.",
}
CHINESE: Phrases = {
    "space": "",
    "colon": "：",
    "comma": "，",
    "and": "，",
    "one positional": "个遵循固定模式",
    "one sink": "个主要关注第一个词元",
    "one low rank": "个的秩不到随机头的一半",
    "one content": "个取决于内容",
    "some positional": "个遵循固定模式",
    "some sink": "个主要关注第一个词元",
    "some low rank": "个的秩不到随机头的一半",
    "some content": "个取决于内容",
    "lead one": "在 {length} 个词元处，共有 1 个注意力头：1 {kind}。",
    "lead": "在 {length} 个词元处，{kinds}。",
    "lead first": "{total} 个注意力头中有 {count} {phrase}",
    "lead next": "{count} {phrase}",
    "one head": "1 个",
    "heads": "{count} 个",
    "text": "在 1 篇 {length} 个词元的文本上测得，因此没有跨文本的区间。",
    "texts": "在 {texts} 篇 {length} 个词元的文本上测得；95% 区间由对文本重采样得到。",
    "rank means": "头的有效秩，是指其注意力矩阵中占到 90% 能量（即各权重的平方和）所需的奇异值个数。",
    "rank": "各头平均为 {rank}（上限 {length}）{range}{certainty}{beside}。",
    "range": "，95% 区间 {low} 至 {high}",
    "exact": "，每个秩都是精确值",
    "tight": "，所示各位数字均可证",
    "certified": "，在这些文本上可证必在 {low} 与 {high} 之间",
    "beside": "；随机头（查询与键为噪声，logit 即 softmax 之前的分数，其离散度相同）平均为 {base}",
    "nothing beside": "；没有测量随机头作对照，因此不判定低秩型",
    "depth": "前三分之一的层平均为 {first}，后三分之一的层平均为 {last}。",
    "growth": "从 {shortest} 到 {longest} 个词元（N），有效秩按 N^{power} 增长{range}{random}。",
    "random growth": "；随机头按 N^{power} 增长",
    "precise": "区间为均值的 ±{reached}%，用 {planned} 篇文本中的 {texts} 篇达到了要求的精度 ±{asked}%。",
    "not precise": (
        "未达到要求的精度（均值的 ±{asked}%）：在 {length} 个词元处区间为 ±{reached}%，"
        "已测 {planned} 篇文本中的 {texts} 篇。{remedy}"
    ),
    "too few": (
        "未达到要求的精度（均值的 ±{asked}%）：至少需要 {fewest} 篇文本，已测 {planned} 篇中的 {texts} 篇。{remedy}"
    ),
    "more texts": "请提供更多文本。",
    "resume": "请继续扫描。",
    "items": "模型对一个输入分多份计算注意力（窗口、通道或帧，最多 {items} 份）：每个头的数值都是各份的平均。",
    "unfinished": "目前已测 {planned} 篇文本中的 {texts} 篇，继续扫描即可完成其余部分。",
    "positional": "{heads}固定模式型头（偏移、窗口或均匀）：该模式平均可解释其 {percent}%。固定模式不需要查询和键。",
    "sink": (
        "{heads}汇聚型头：对其后的查询，前四个词元平均占 {percent}% 的权重；"
        "只保留这些词元和一个窗口，至多损失 {rest}% 的权重。"
    ),
    "low rank": (
        "{heads}低秩型头，平均秩 {rank}：两个该秩的因子只有原矩阵元素数的 {percent}%，可考虑低秩或线性注意力。"
    ),
    "not low enough": "{heads}低秩型头，平均秩 {rank}，在 {length} 个词元处还不足以节省计算。",
    "content": "{heads}内容型头：不建议替换。",
    "caveat": "以上只是候选：这里测量的是权重，替换后对模型损失的影响还需另行测量。",
    "pair lead": (
        "在相同的 {texts} 篇 {length} 个词元的文本上，{all} 个头中有 {down} 个在 {a} 中的有效秩低于在 {b} 中，"
        "{up} 个更高；{flat} 个头的差值的 95% 区间包含 0。"
    ),
    "pair lead one": (
        "在同一篇 {length} 个词元的文本上，{all} 个头中有 {down} 个在 {a} 中的有效秩低于在 {b} 中，{up} 个更高，"
        "{flat} 个相等。只有一篇文本，因此没有区间。"
    ),
    "unpaired lead": (
        "各头有效秩的平均值在 {a} 中为 {rank}，在 {b} 中为 {other}。两次扫描没有长度相同的共同文本，因此没有配对差值。"
    ),
    "pair rank": "各头平均值在 {a} 中为 {rank}，在 {b} 中为 {other}，相差 {difference}{range}。",
    "pair range": "（逐文本配对，95% 区间 {low} 至 {high}）",
    "pair kinds": "{all} 个头中有 {changed} 个的类别不同。",
    "pair delta": ("两个模型的注意力矩阵之差 ΔA，其范数平均为 A 的范数的 {relative} 倍；矩阵相同时为 0。"),
    "pair growth": (
        "从 {shortest} 到 {longest} 个词元（N），平均有效秩在 {a} 中按 N^{power} 增长，在 {b} 中按 N^{other} 增长。"
    ),
    "pair positional": "固定模式型头：{a} 有 {count} 个，{b} 有 {other} 个。",
    "pair sink": "汇聚型头：{a} 有 {count} 个，{b} 有 {other} 个。",
    "pair low rank": "低秩型头：{a} 有 {count} 个，{b} 有 {other} 个。",
    "pair content": "内容型头：{a} 有 {count} 个，{b} 有 {other} 个。",
}
PHRASES = {"en": ENGLISH, "zh": CHINESE}
