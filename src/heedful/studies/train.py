"""Train the model of one run: a plain loop whose result depends only on the config.

rate        lr · min(t / w, 0.1 + 0.9 (1 + cos(π (t − w) / (T − w))) / 2),  w warmup steps, T steps in total
loss        cross-entropy with label smoothing, mean over the tokens of a batch; losses of a split have no smoothing
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from heedful.nn import Transformer, count_weights
from heedful.shapes import Tensor
from heedful.studies.config import Run, build
from heedful.studies.data import END, PAD, Batch, Corpus, Pairs, batches, by_length, gather, shuffle_targets
from heedful.studies.step import Steps, hidden

Record = Callable[[dict[str, Any]], None]


def start(run: Run, corpus: Corpus, device: torch.device) -> Transformer:
    """The run's model before its first step; weights depend only on the seed, not on the device."""
    torch.manual_seed(run.seed)
    return build(run.model, corpus.vocabulary, encoder=corpus.has_source).to(device)


def train(
    run: Run,
    corpus: Corpus,
    device: torch.device,
    record: Record,
    *,
    checkpoint: Path | None = None,
    checkpoint_every: int = 0,
    stop_after: int | None = None,
    graphs: bool = True,
) -> Transformer:
    """Train the model of a run and return it; calls `record` with losses and gradient norms.

    checkpoint         file to resume from if it exists, written every `checkpoint_every` steps
    stop_after         stop after this step, as if interrupted
    graphs             replay steps from CUDA graphs
    """
    settings = run.training
    model = start(run, corpus, device)
    steps = Steps(model, settings, graphs=graphs)
    pairs = corpus.splits["train"]
    if run.shuffled:
        pairs = shuffle_targets(pairs, run.seed)
    torch.manual_seed(run.seed + 1)
    done = 0
    if checkpoint is not None and checkpoint.exists():
        done = _restore(checkpoint, run, model, steps, device)
    every = max(1, settings.steps // settings.evaluations)
    taken: list[Tensor] = []
    began = time.perf_counter()
    for step, rows in islice(enumerate(batches(pairs, settings.tokens, run.seed), 1), done, settings.steps):
        taken.append(steps(gather(pairs, rows, device), step))
        if step % every == 0 or step == settings.steps:
            losses, norms = torch.stack(taken, 1).tolist()
            seconds = time.perf_counter() - began
            if not all(map(math.isfinite, losses)):
                raise FloatingPointError(f"loss: not finite at or before step {step} of run {run.key} ({run.cell}).")
            record(
                {
                    "kind": "steps",
                    "step": step,
                    "seconds": round(seconds, 3),
                    "loss": [round(x, 4) for x in losses],
                    "norm": [round(x, 4) for x in norms],
                    "dev": split_loss(model, corpus.splits["dev"], device),
                }
            )
            taken, began = [], time.perf_counter()
        if checkpoint is not None and checkpoint_every and step % checkpoint_every == 0:
            _save(checkpoint, run, model, steps, step)
        if step == stop_after:
            break
    return model


def split_loss(model: Transformer, pairs: Pairs, device: torch.device, limit: int = 1000) -> float:
    """Mean cross-entropy per token over the first pairs of a split, without dropout and smoothing."""
    return evaluate(model, pairs, device, limit)["loss"]


@torch.no_grad()
def evaluate(model: Transformer, pairs: Pairs, device: torch.device, limit: int = 1000) -> dict[str, float]:
    """Mean cross-entropy of the first pairs of a split, and accuracy: the share of tokens ranked first by the model."""
    was_training = model.training
    model.eval()
    total, right, count = torch.zeros(3, device=device, dtype=torch.float64)
    for batch in _in_order(pairs, limit, device):
        logits = model.logits(hidden(model, batch)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch.wanted.flatten(), ignore_index=PAD, reduction="sum")
        counts = batch.wanted != PAD
        right = right + ((logits.argmax(-1) == batch.wanted) & counts).sum()
        total, count = total + loss.double(), count + counts.sum()
    model.train(was_training)
    return {"loss": round(float(total / count), 5), "accuracy": round(float(right / count), 5)}


def unigram_loss(corpus: Corpus, split: str) -> float:
    """Cross-entropy of a split's tokens by their training frequencies: the loss of a model without any input."""

    def tokens(pairs: Pairs) -> Tensor:
        target = pairs.target
        counted = target.tokens if target.counts is None else target.tokens[target.counts.bool()]
        ends = torch.full((len(pairs) if target.counts is None else 0,), END)
        return torch.cat([counted, ends])

    frequency = torch.bincount(tokens(corpus.splits["train"]), minlength=corpus.vocabulary).double() + 0.1
    return round(float(-(frequency / frequency.sum()).log()[tokens(corpus.splits[split])].mean()), 5)


def _in_order(pairs: Pairs, limit: int, device: torch.device) -> Iterator[Batch]:
    longest = torch.maximum(pairs.source.lengths, pairs.target.lengths)[:limit] + 1
    for rows in by_length(longest, 16384, torch.arange(len(longest))):
        yield gather(pairs, rows, device)


def summary(run: Run, model: Transformer, corpus: Corpus, device: torch.device) -> dict[str, Any]:
    """Facts about a trained model: number of weights, optimiser memory, the loss of every split."""
    counts = count_weights(model)
    tests = {name: evaluate(model, pairs, device) for name, pairs in corpus.splits.items()}
    return {
        "weights": counts._asdict(),
        "optimiser_bytes": 2 * 4 * counts.trainable,
        "losses": {name: test["loss"] for name, test in tests.items()},
        "accuracies": {name: test["accuracy"] for name, test in tests.items()},
        "unigram_loss": unigram_loss(corpus, "test"),
    }


def _save(path: Path, run: Run, model: Transformer, steps: Steps, step: int) -> None:
    """Write everything that the next step depends on, atomically."""
    state = {
        "run": run.key,
        "step": step,
        "model": model.state_dict(),
        "masters": [p.detach() for p in steps.masters],
        "optimiser": steps.optimiser.state_dict(),
        "random": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    part = path.with_suffix(f".{random.getrandbits(32):08x}.part")
    torch.save(state, part)
    part.replace(path)


def _restore(path: Path, run: Run, model: Transformer, steps: Steps, device: torch.device) -> int:
    state = torch.load(path, map_location=device, weights_only=True)
    if state["run"] != run.key:
        raise ValueError(f"{path}: a checkpoint of run {state['run']}, expected {run.key}. Remove it to start anew.")
    model.load_state_dict(state["model"])
    with torch.no_grad():
        for master, saved in zip(steps.masters, state["masters"], strict=True):
            master.copy_(saved)
    steps.optimiser.load_state_dict(state["optimiser"])
    torch.set_rng_state(state["random"].cpu())
    if state["cuda"]:
        torch.cuda.set_rng_state_all([x.cpu() for x in state["cuda"]])
    return int(state["step"])
