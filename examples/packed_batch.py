"""Three sequences in one row: what each gets is what it gets alone, and nothing is spent on padding."""

import torch

import heedful as h

torch.manual_seed(0)
lengths = [700, 50, 250]
segments = h.segments.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0))  # 0 … 0, 1 … 1, 2 … 2
q, k, v = torch.randn(3, 8, sum(lengths), 64).unbind()  # (heads, tokens, width)

for mechanism in (h.Softmax(h.Window(128, sinks=4)), h.Linear(h.FavorPlus(64, 128)), h.FixedPattern("left")):
    packed = mechanism(q, k, v, segments=segments)
    alone = [mechanism(*parts) for parts in zip(*(x.split(lengths, -2) for x in (q, k, v)), strict=True)]
    print(f"{type(mechanism).__name__:24} packed − alone: {(packed - torch.cat(alone, -2)).abs().max():.1e}")
