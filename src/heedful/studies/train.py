"""Train the model of one run: a plain loop whose result depends on the config alone.

rate        lr · min(t / w, 0.1 + 0.9 (1 + cos(π (t − w) / (T − w))) / 2),  w steps of warmup, T in all
loss        cross-entropy with smoothed labels, mean over the tokens of a batch; losses of a split are without smoothing
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from heedful.nn import Transformer, count_weights
from heedful.shapes import Tensor
from heedful.studies.config import Run, Training, build
from heedful.studies.data import PAD, Batch, Corpus, Pairs, batches, by_length, gather, shuffle_targets

Record = Callable[[dict[str, Any]], None]


def start(run: Run, vocabulary: int, device: torch.device) -> Transformer:
    """The run's model before its first step; weights depend on the seed alone, not on the device."""
    torch.manual_seed(run.seed)
    return build(run.model, vocabulary).to(device)


def train(
    run: Run,
    corpus: Corpus,
    device: torch.device,
    record: Record,
    *,
    checkpoint: Path | None = None,
    checkpoint_every: int = 0,
    stop_after: int | None = None,
) -> Transformer:
    """Train the model of a run and return it; tell `record` of losses and gradient norms along the way.

    checkpoint         a file to go on from where it exists, and to write to every `checkpoint_every` steps
    stop_after         leave after this step, as if interrupted
    """
    settings = run.training
    model = start(run, corpus.vocabulary, device)
    optimiser = make_optimiser(model, settings)
    pairs = corpus.splits["train"]
    if run.shuffled:
        pairs = shuffle_targets(pairs, run.seed)
    torch.manual_seed(run.seed + 1)
    done = 0
    if checkpoint is not None and checkpoint.exists():
        done = _restore(checkpoint, run, model, optimiser, device)
    every = max(1, settings.steps // settings.evaluations)
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    began = time.perf_counter()
    for step, rows in islice(enumerate(batches(pairs, settings.tokens, run.seed), 1), done, settings.steps):
        loss, norm = train_step(model, optimiser, gather(pairs, rows, device), settings, step)
        losses.append(loss)
        norms.append(norm)
        if step % every == 0 or step == settings.steps:
            taken, in_steps = time.perf_counter(), torch.stack(losses).tolist()
            if not all(map(math.isfinite, in_steps)):
                raise FloatingPointError(f"loss: not finite at or before step {step} of run {run.key} ({run.cell}).")
            record(
                {
                    "kind": "steps",
                    "step": step,
                    "seconds": round(taken - began, 3),
                    "loss": [round(x, 4) for x in in_steps],
                    "norm": [round(x, 4) for x in torch.stack(norms).tolist()],
                    "dev": split_loss(model, corpus.splits["dev"], device),
                }
            )
            losses, norms, began = [], [], time.perf_counter()
        if checkpoint is not None and checkpoint_every and step % checkpoint_every == 0:
            _save(checkpoint, run, model, optimiser, step)
        if step == stop_after:
            break
    return model


def make_optimiser(model: Transformer, settings: Training) -> torch.optim.AdamW:
    """AdamW over the trained weights; matrices decay, vectors do not."""
    learns = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learns if p.ndim > 1], "weight_decay": settings.decay},
        {"params": [p for p in learns if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = learns[0].is_cuda
    return torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.98), eps=1e-9, fused=fused or None)


def train_step(
    model: Transformer, optimiser: torch.optim.Optimizer, batch: Batch, settings: Training, step: int
) -> tuple[Tensor, Tensor]:
    """One step; the loss and the norm of the gradient before it is clipped."""
    for group in optimiser.param_groups:
        group["lr"] = rate(settings, step)
    model.train()
    loss = batch_loss(model, batch, settings.smoothing)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    optimiser.step()
    return loss.detach(), norm.detach()


def rate(settings: Training, step: int) -> float:
    """The learning rate of a step, counted from 1."""
    warmup = max(1, round(settings.warmup * settings.steps))
    if step <= warmup:
        return settings.rate * step / warmup
    share = (step - warmup) / max(1, settings.steps - warmup)
    return settings.rate * (0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2)


def batch_loss(model: Transformer, batch: Batch, smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
    """Cross-entropy of the wanted tokens, in bfloat16 where the weights are on a GPU."""
    with reduced_precision(batch.source.device):
        logits = model(batch.source, batch.given, segments=batch.segments, words=batch.words)
    return F.cross_entropy(
        logits.float().flatten(0, 1),
        batch.wanted.flatten(),
        ignore_index=PAD,
        label_smoothing=smoothing,
        reduction=reduction,
    )


def reduced_precision(device: torch.device):
    """bfloat16 for matrix products on a GPU; nothing on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


@torch.no_grad()
def split_loss(model: Transformer, pairs: Pairs, device: torch.device, limit: int = 1000) -> float:
    """Mean cross-entropy a token over the first pairs of a split, without dropout and smoothing."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for batch in _in_order(pairs, limit, device):
        total += float(batch_loss(model, batch, reduction="sum"))
        count += int((batch.wanted != PAD).sum())
    model.train(was_training)
    return round(total / count, 5)


def _in_order(pairs: Pairs, limit: int, device: torch.device) -> Iterator[Batch]:
    longest = torch.maximum(pairs.source.lengths, pairs.target.lengths)[:limit] + 1
    for rows in by_length(longest, 16384, torch.arange(len(longest))):
        yield gather(pairs, rows, device)


def summary(run: Run, model: Transformer, corpus: Corpus, device: torch.device) -> dict[str, Any]:
    """What is known of a trained model without translating: weights, optimiser memory, the loss of every split."""
    counts = count_weights(model)
    return {
        "weights": counts._asdict(),
        "optimiser_bytes": 2 * 4 * counts.trainable,
        "losses": {name: split_loss(model, pairs, device) for name, pairs in corpus.splits.items()},
    }


def _save(path: Path, run: Run, model: Transformer, optimiser: torch.optim.Optimizer, step: int) -> None:
    """Write all that the next step depends on; the file is whole or is not there."""
    state = {
        "run": run.key,
        "step": step,
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "random": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    part = path.with_suffix(f".{random.getrandbits(32):08x}.part")
    torch.save(state, part)
    part.replace(path)


def _restore(path: Path, run: Run, model: Transformer, optimiser: torch.optim.Optimizer, device: torch.device) -> int:
    state = torch.load(path, map_location=device, weights_only=True)
    if state["run"] != run.key:
        raise ValueError(f"{path}: a checkpoint of run {state['run']}, expected {run.key}. Remove it to start anew.")
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    torch.set_rng_state(state["random"].cpu())
    if state["cuda"]:
        torch.cuda.set_rng_state_all([x.cpu() for x in state["cuda"]])
    return int(state["step"])
