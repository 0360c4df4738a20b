"""An encoder layer of seven fixed heads and one learned (Raganato et al. 2020): one head needs queries and keys."""

import torch

import heedful as h

torch.manual_seed(0)
kinds = ("current", "previous", "next", "left", "right", "start", "end")
heads = h.Mixture([*(h.FixedPattern(kind) for kind in kinds), h.Softmax(h.Full())])
layer = h.nn.Attention(128, heads=8, mechanism=heads)

x = torch.randn(2, 50, 128)
segments = h.segments.from_lengths(torch.tensor([50, 30]), 50)  # the second sentence is shorter
out = layer(x, segments=segments)
out.sum().backward()

used = layer.q_proj.weight.grad.unflatten(0, (8, 16)).abs().amax((1, 2)) > 0
print(f"output {tuple(out.shape)}; heads whose queries learn: {used.nonzero().flatten().tolist()}")
