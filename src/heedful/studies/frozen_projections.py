"""Study b: how well does translation work if queries and keys are random projections that are never trained?

Text 003 proposes orthogonal random attention: W_q and W_k orthogonal, drawn once and frozen, in every attention layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from heedful.studies.config import Group, Model, Run, Training
from heedful.studies.fixed_heads import training

QUESTION = "How many BLEU does freezing Q and K cost at 5,000 and 20,000 pairs, and does orthogonality matter?"

PREDICTION = """\
Written before the first run. Frozen orthogonal Q and K lose 0.5 to 3 BLEU at 20,000 pairs and less at 5,000, where at
best they equal learned ones; they do not gain. Most of the loss is in cross-attention, whose alignment must be learned
through the tokens alone. Gaussian, Hadamard, per-head and global orthogonal projections lie within 0.5 BLEU of each
other: at a head width of 32 in 256 Gaussian rows are nearly orthogonal. Four frozen heads of eight cost less than 0.5.
An orthogonal start that is trained equals learned projections; a LoRA of rank 8 wins back most of the loss. Freezing V
too costs about 1 more. Linear and FAVOR+ attention are below softmax whether projections learn or not."""


def everywhere(*groups: Group) -> Model:
    """The same heads in encoder, decoder and cross-attention."""
    return Model(encoder=groups, decoder=groups, cross=groups)


CELLS: dict[str, Model] = {
    "learned": everywhere(Group(8)),
    "orthogonal": everywhere(Group(8, qk="orthogonal")),
    "orthogonal global": everywhere(Group(8, qk="orthogonal-global")),
    "gaussian": everywhere(Group(8, qk="gaussian")),
    "hadamard": everywhere(Group(8, qk="hadamard")),
    "orthogonal start, trained": everywhere(Group(8, qk="orthogonal-start")),
    "4 of 8 orthogonal": everywhere(Group(4), Group(4, qk="orthogonal")),
    "orthogonal + LoRA 8": everywhere(Group(8, qk="orthogonal-lora")),
    "Q, K, V orthogonal": everywhere(Group(8, qk="orthogonal", v="orthogonal")),
    "one orthogonal for all layers": replace(everywhere(Group(8, qk="orthogonal")), shared=("q_proj", "k_proj")),
}

COMBINED: dict[str, Model] = {
    f"{name}, {qk}": Model(encoder=(Group(8, name, qk),), decoder=(Group(8, name, qk),))
    for name in ("linear", "favor+", "window")
    for qk in ("learned", "orthogonal")
}
"""Cells with other mechanisms in self-attention; cross-attention stays softmax with learned projections."""


TASKS: dict[str, tuple[Training, dict[str, Any]]] = {
    "prose": (Training(2_000, smoothing=0.0), {}),
    "manuals": (Training(600, smoothing=0.0), {}),
    "recall": (Training(2_000, smoothing=0.0), {"layers": 2, "dropout": 0.0}),
}
"""Training on the other tasks, and how their models differ; see corpora/tasks.py."""


def runs(seeds: Iterable[int], corpora: Iterable[str] = ("de-5000", "de-20000"), direction: str = "de-en") -> list[Run]:
    """The runs of every cell on every corpus or task, ordered by seed."""

    def run(cell: str, corpus: str, model: Model, seed: int) -> Run:
        if corpus in TASKS:
            settings, other = TASKS[corpus]
            return Run("frozen-projections", cell, corpus, settings, replace(model, **other), "source-target", seed)
        return Run("frozen-projections", cell, corpus, training(corpus), model, direction, seed)

    return [
        run(cell, corpus, model, seed)
        for seed in seeds
        for corpus in corpora
        for cell, model in (CELLS | COMBINED).items()
    ]
