"""One step of training: loss, gradients, clipping, AdamW.

On a GPU, weights and activations are bfloat16. AdamW updates float32 weights, which are rounded to bfloat16 after each
step. A step is about 600 small kernels, so launching them takes longer than running them. Therefore the second batch of
each shape is captured in a CUDA graph, which later batches of that shape replay. Capturing neither repeats nor skips a
step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from heedful.core import Mechanism
from heedful.nn import Hadamard, Transformer
from heedful.shapes import Float, Tensor
from heedful.studies.config import Training
from heedful.studies.data import PAD, Batch
from heedful.studies.loss import token_loss


class Steps:
    """Trains a model with one batch per call.

    model      a model with weights on the device; on a GPU they are rounded to bfloat16 here
    graphs     capture steps in CUDA graphs; ignored on a CPU
    """

    def __init__(self, model: Transformer, settings: Training, *, graphs: bool = True):
        self.model, self.settings = model, settings
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.device = self.weights[0].device
        on_gpu = self.device.type == "cuda"
        self.masters = self.weights
        if on_gpu:
            self.masters = [torch.nn.Parameter(p.detach().clone()) for p in self.weights]
            round_to(model, getattr(torch, settings.precision))
        self.optimiser = make_optimiser(self.masters, settings)
        self.graphs = graphs and on_gpu
        self._inputs: dict[tuple[int, ...], Batch] = {}
        self._captured: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.graphs else None

    def __call__(self, batch: Batch, step: int) -> Float[Tensor, " 2"]:
        """Take a step, counted from 1; return the loss and the norm of the gradient before clipping."""
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate(self.settings, step))
            else:
                group["lr"] = rate(self.settings, step)
        if not self.graphs:
            return self._step(batch)
        shape = tuple(batch.source.shape)
        if shape not in self._inputs:
            self._inputs[shape] = Batch(*(x.clone() for x in batch))
            return self._step(self._inputs[shape])
        for kept, given in zip(self._inputs[shape], batch, strict=True):
            kept.copy_(given)
        if shape not in self._captured:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            here = torch.cuda.current_stream()
            with torch.cuda.graph(graph, pool=self._pool, stream=here, capture_error_mode="thread_local"):
                found = self._step(self._inputs[shape])
            self._captured[shape] = graph, found
        graph, found = self._captured[shape]
        graph.replay()
        return found.clone()

    def _step(self, batch: Batch) -> Tensor:
        self.model.train()
        loss = batch_loss(self.model, batch, self.settings.smoothing)
        for weight in self.weights:
            weight.grad = None
        loss.backward()
        if self.masters is not self.weights:
            for master in self.masters:
                master.grad = torch.empty_like(master)
            _copy([p.grad for p in self.weights], [p.grad for p in self.masters])
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.settings.clip)
        self.optimiser.step()
        if self.masters is not self.weights:
            _copy(self.masters, self.weights)
        return torch.stack([loss.detach().float(), norm.detach().float()])


@torch.no_grad()
def _copy(given: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
    torch._foreach_copy_([x for x in into if x is not None], [x for x in given if x is not None])


def round_to(model: Transformer, dtype: torch.dtype) -> None:
    """Round weights and frozen projections; tensors of mechanisms stay unchanged.

    Replaces Hadamard projections by one matrix product: at this width they take 40 launches, four times a whole step.
    """
    inside = {id(part) for one in model.modules() if isinstance(one, Mechanism) for part in one.modules()}
    for module in model.modules():
        if id(module) in inside:
            continue
        for weight in module.parameters(recurse=False):
            weight.data = weight.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
        if isinstance(module, Hadamard):
            module.materialise(dtype)


def make_optimiser(weights: list[torch.nn.Parameter], settings: Training) -> torch.optim.AdamW:
    """AdamW over these weights, with weight decay on matrices only."""
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": settings.decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    if not weights[0].is_cuda:
        return torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.98), eps=1e-9)
    for group in groups:
        group["lr"] = torch.zeros((), device=weights[0].device)
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-9, fused=True, capturable=True)


def rate(settings: Training, step: int) -> float:
    """The learning rate of a step, counted from 1."""
    warmup = max(1, round(settings.warmup * settings.steps))
    if step <= warmup:
        return settings.rate * step / warmup
    share = (step - warmup) / max(1, settings.steps - warmup)
    return settings.rate * (0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2)


def batch_loss(model: Transformer, batch: Batch, smoothing: float = 0.0) -> Float[Tensor, ""]:
    """Mean cross-entropy of the target tokens."""
    x = hidden(model, batch)
    return token_loss(x.flatten(0, 1), model.embedding.weight, batch.wanted.flatten(), smoothing, PAD)


def hidden(model: Transformer, batch: Batch) -> Float[Tensor, "b m d"]:
    """The decoder's last hidden states, from which the logits are computed."""
    if not model.encoder:
        return model.decode(batch.given)
    memory = encode(model, batch)
    return model.decode(batch.given, memory, memory_segments=batch.segments)


def encode(model: Transformer, batch: Batch) -> Float[Tensor, "b n d"]:
    """The encoder's output, to which the decoder attends. Padding is on the right, so indices are positions."""
    positions = torch.arange(batch.source.shape[1], device=batch.source.device)
    return model.encode(batch.source, segments=batch.segments, words=batch.words, positions=positions)


def prepare() -> torch.device:
    """The device for training, prepared for CUDA graphs, which are captured on a separate stream."""
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda.set_stream(torch.cuda.Stream())
    return torch.device("cuda")
