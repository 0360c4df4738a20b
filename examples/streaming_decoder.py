"""A decoder that keeps the same few numbers however long it runs: linear attention, token by token."""

import torch

import heedful as h

torch.manual_seed(0)
layer = h.nn.Attention(64, heads=4, mechanism=h.Linear(), rope=h.nn.Rope(16)).eval()
text = torch.randn(1, 200, 64)

with torch.no_grad():
    out, state = layer.prefill(text[:, :100])  # the prompt, at once
    for t in range(100, 200):  # the rest, one by one
        out, state = layer.step(state, text[:, t : t + 1])
    whole = layer(text)

kept = sum(x.numel() for x in state.inner if x is not None)
print(f"last output: off by {(out - whole[:, -1:]).abs().max():.1e} from the whole sequence at once")
print(f"state after 200 tokens: {kept} numbers; a cache of keys and values would hold {2 * 200 * 64}")
