"""Scans that nobody measured: heads of four sorts with numbers that fit together, for pages to show."""

from __future__ import annotations

import hashlib
import math
import random
from pathlib import Path
from typing import Any

from heedful.scan import Scan
from heedful.store.scans import FORMAT, ROWS, Run

SORTS = ("previous", "sink", "low rank", "content")
HOSTILE = "</script><script>alert(1)</script>"
CELLS = 48


def sort_of(layer: int, head: int) -> str:
    return SORTS[(3 * layer + head) % 7 % 4]


def manifest(
    name: str, layers: int, heads: int, texts: int, lengths: list[int], kind: str = "causal", salt: bytes = b""
) -> dict[str, Any]:
    tokens = ["Ġthe", "Ġcat", HOSTILE, "Ġ<b>", "Ġsat", "Ċ", "Ġon\u2028", "Ġ“mats”"]
    return {
        "format": FORMAT,
        "model": f"models/{name}",
        "model_type": "llama",
        "fingerprint": hashlib.sha256(name.encode()).hexdigest()[:16],
        "layers": [
            {
                "layer": i,
                "name": f"model.layers.{i}.self_attn",
                "kind": kind,
                "heads": heads,
                "kv_heads": max(1, heads // 3),
                "width": 64,
            }
            for i in range(layers)
        ],
        "options": {"values": 32},
        "versions": {"heedful": "0.1.0", "torch": "2.13.0"},
        "device": "cpu",
        "lengths": lengths,
        "texts": [
            {
                "id": f"{i:04d}",
                "sha256": hashlib.sha256(salt + b"%d" % i).hexdigest(),
                "tokens": lengths[-1],
                "title": f"Text {i}",
            }
            for i in range(texts)
        ],
        "thumbnail_tokens": {str(n): [tokens[i % len(tokens)] for i in range(n)] for n in lengths},
    }


def row(text: str, length: int, layer: int, head: int, shift: float, chance: random.Random) -> dict[str, Any]:
    sort, noise = sort_of(layer, head), chance.uniform(0.95, 1.05)
    level = {"previous": 0.8, "sink": 0.02, "low rank": 0.05, "content": 1.1}[sort]
    growth = length ** (0.97 if sort == "previous" else 0.8)
    rank = level * growth * (1.4 - layer / 50) * (1 + head / 40) * shift * noise
    rank = min(max(1.0, rank), 0.9 * length)
    decay = {"previous": 0.05, "sink": 1.6, "low rank": 1.1, "content": 0.5}[sort]
    sink = {"sink": 0.75, "low rank": 0.2}.get(sort, 0.05) * noise
    values = {name: None for name in ROWS} | {
        "text": text,
        "length": length,
        "layer": layer,
        "head": head,
        "name": f"model.layers.{layer}.self_attn",
        "kind": "causal",
        "turn": 0,
        "sigma1": 2.0 * noise,
        "energy": 30.0 * noise,
        "energy10": min(1.0, {"previous": 0.15, "content": 0.6}.get(sort, 0.95) * noise),
        "decay": None if sort == "previous" else decay * noise,
        "stable_rank": rank / 2,
        "entropic_rank": rank / 1.3,
        "entropy": 2.5 * noise,
        "entropy_share": 0.4 * noise,
        "concentration": 0.3 * noise,
        "largest": min(1.0, 0.4 * noise),
        "sink": sink,
        "first": sink,
        "distance": (1.5 if sort == "previous" else length / 6) * noise,
        "label": "content" if sort == "low rank" else sort,
        "label_score": {"previous": 0.9, "sink": 0.7}.get(sort, 0.3) * noise,
        "position_share": {"previous": 0.9, "sink": 0.8}.get(sort, 0.1) * noise,
        "logit_std": 1.3 * noise,
        "base_rank90": 0.42 * length,
        "base_rank95": 0.55 * length,
        "base_energy10": 0.5,
        "base_entropy": 4.0,
        "sigma": [2.0 * noise * i**-decay for i in range(1, min(length, 128) + 1)],
        "sigma_certified": 12,
        "base_sigma": [1.5 * i**-0.25 for i in range(1, min(length, 128) + 1)],
        "seconds": 0.1,
        "seed": 0,
        "device": "cpu",
        "version": "0.1.0",
    }
    for offset, share in zip(range(-2, 3), (0.05, 0.8 if sort == "previous" else 0.1, 0.1, 0.0, 0.0), strict=True):
        values[f"offset_{offset}"] = share * noise
    for tau, part in ((90, 0.8), (95, 1.0)):
        values |= {
            f"rank{tau}": part * rank,
            f"rank{tau}_low": part * rank * 0.98,
            f"rank{tau}_high": part * rank * 1.02,
        }
    return values


def picture(layer: int, head: int, length: int, chance: random.Random) -> dict[str, Any]:
    sort = sort_of(layer, head)
    cells = []
    for i in range(CELLS):
        for j in range(CELLS):
            weight = 0.02 * chance.random() + (0.3 * chance.random() ** 6 if sort in ("content", "low rank") else 0)
            weight += {
                "previous": math.exp(-((i - j) ** 2) / 1.5),
                "sink": float(j == 0),
                "low rank": 0.5 * (j % 9 == 4),
            }.get(sort, 0)
            cells.append(min(255, round(255 * weight)) if j <= i else 0)
    few = min(length, CELLS)
    return {
        "text": "0000",
        "length": length,
        "layer": layer,
        "head": head,
        "height": CELLS,
        "width": CELLS,
        "cells": cells,
        "scale": 0.61,
        "pooling": "mean",
        "tokens_per_cell": length / few,
    }


def synthetic(
    folder: Path,
    name: str = "tiny",
    layers: int = 3,
    heads: int = 4,
    texts: int = 3,
    lengths: tuple[int, ...] = (64, 128),
    shift: float = 1.0,
    seed: int = 0,
    salt: bytes = b"",
    precision: float | None = None,
    planned: int | None = None,
) -> Scan:
    """A run folder as a scan writes it, opened again."""
    chance = random.Random(seed)
    about = {**manifest(name, layers, heads, planned or texts, list(lengths), salt=salt), "precision": precision}
    run = Run.begin(folder, about)
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    for text in run.manifest["texts"][:texts]:
        for length in lengths:
            rows = [row(text["id"], length, layer, head, shift, chance) for layer, head in places]
            run.write(text["id"], length, rows)
    for length in lengths:
        run.write("0000", length, [picture(layer, head, length, chance) for layer, head in places], table="thumbnails")
    return Scan.open(folder)


def uneven(folder: Path) -> Scan:
    """An encoder and a decoder of other widths on one text; no random heads, one picture, a layer without spectra."""
    chance, length = random.Random(0), 64
    about = manifest("<i>" + "a-long-name-" * 8, 6, 8, 1, [length])
    for layer in about["layers"]:
        layer["kind"] = ("self", "causal", "cross")[layer["layer"] // 2]
    rows = [
        row("0000", length, layer, head, 1.0, chance) for layer in range(6) for head in range(4 if layer < 2 else 8)
    ]
    for each in rows:
        each["kind"] = about["layers"][each["layer"]]["kind"]
        each |= {name: None for name in ROWS if name.startswith("base_") or (name == "sigma" and each["layer"] == 3)}
    run = Run.begin(folder, about)
    run.write("0000", length, rows)
    run.write("0000", length, [picture(0, 0, length, chance)], table="thumbnails")
    return Scan.open(folder)


def changing(folder: Path) -> Scan:
    """Heads that are of one kind at the first length and of another at the last; head 1 attends to all tokens alike;
    ranks of layer 0 are exact."""
    chance, lengths = random.Random(0), [64, 128]
    run = Run.begin(folder, manifest("changing", 2, 4, 2, lengths))
    for text in run.manifest["texts"]:
        for length in lengths:
            rows = [row(text["id"], length, layer, head, 1.0, chance) for layer in range(2) for head in range(4)]
            for each in rows:
                if each["layer"] == 0:
                    each |= {f"rank{tau}_{side}": each[f"rank{tau}"] for tau in (90, 95) for side in ("low", "high")}
                    each |= {"label": "previous", "label_score": 0.9} if length == 64 else {}
                if each["head"] == 1:
                    each |= {"label": "uniform", "label_score": 0.66, "position_share": 0.11, "sink": 0.02}
            run.write(text["id"], length, rows)
    return Scan.open(folder)
