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

learned = [head for head, reads in enumerate(layer.query_heads) if reads]
print(f"output {tuple(out.shape)}; heads with queries and keys: {learned}")
print(f"weights of q_proj and k_proj: {2 * layer.q_proj.weight.numel()}; eight learned heads have {2 * 128**2}")

# The same heads with queries and keys that are random, orthogonal and never trained: v_proj and out_proj learn.
frozen = h.nn.Attention(128, heads=8, mechanism=heads, qk=h.nn.Orthogonal, seed=0)
print(f"trained with frozen queries and keys: {[name for name, _ in frozen.named_parameters()]}")
