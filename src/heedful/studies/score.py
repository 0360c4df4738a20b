"""Score recorded runs: `python -m heedful.studies.score --records carry/records --publish FOLDER`.

BLEU and chrF are computed by sacreBLEU, with their signatures. Two more numbers reveal a broken model: the shares of
empty outputs and of copies of the source. A row has what tables, pages and verdicts need, about 2 KB per run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from heedful.studies.records import read
from heedful.studies.results import Row, of_study, save
from heedful.studies.tables import markdown

SAMPLES = (0, 7, 42, 123, 314)
"""Test sentences shown on a page."""


def score(outputs: list[str], sources: list[str], references: list[str]) -> dict[str, Any]:
    """BLEU, chrF, and the shares of outputs that are empty or copies of the source."""
    from sacrebleu.metrics import BLEU, CHRF

    bleu, chrf = BLEU(), CHRF()
    found = bleu.corpus_score(outputs, [references])
    return {
        "bleu": round(found.score, 3),
        "chrf": round(chrf.corpus_score(outputs, [references]).score, 3),
        "length_ratio": round(found.sys_len / max(1, found.ref_len), 4),
        "empty": sum(not line.strip() for line in outputs) / len(outputs),
        "copies": sum(a.strip() == b.strip() for a, b in zip(outputs, sources, strict=True)) / len(outputs),
        "signatures": [str(bleu.get_signature()), str(chrf.get_signature())],
    }


def rows(folder: Path, data: Path) -> Iterable[Row]:
    """One row for each recorded run: its config, scores on both tests, losses, weights, times and curves."""
    runs: dict[str, list[Row]] = {}
    seen: set[str] = set()
    for line in read(folder):
        if line["kind"] == "config":
            runs[line["run"]] = []
        runs[line["run"]].append(line)
        if line["kind"] == "result" and line["run"] not in seen:
            seen.add(line["run"])
            yield _row(runs.pop(line["run"]), data)


def _row(lines: list[Row], data: Path) -> Row:
    first, *steps, result = lines
    config = first["config"]
    norms = [norm for line in steps for norm in line["norm"]]
    row = {
        "run": result["run"],
        **{name: config[name] for name in ("study", "cell", "corpus", "direction", "seed", "shuffled")},
        "steps": config["training"]["steps"],
        "hardware": first["hardware"]["device"],
        **{
            name: result.get(name)
            for name in (
                *("weights", "losses", "accuracies", "unigram_loss", "step_seconds", "train_seconds"),
                *("translate_seconds", "optimiser_bytes", "peak_bytes"),
            )
        },
        "norm": {"early": _variation(norms[20:200]), "late": _variation(norms[-200:])},
        "curve": [[line["step"], round(mean(line["loss"]), 3), round(line["dev"], 3)] for line in steps],
    }
    if result["outputs"]:
        source, target = config["direction"].split("-")
        folder = data / config["corpus"]
        texts = {name: [_lines(folder / f"{name}.{x}.txt") for x in (source, target)] for name in result["outputs"]}
        row["tests"] = {name: score(outputs, *texts[name]) for name, outputs in result["outputs"].items()}
        if config["seed"] == 0:
            kept = [at for at in SAMPLES if at < len(result["outputs"]["test"])]
            row["samples"] = [[side[at] for side in (*texts["test"], result["outputs"]["test"])] for at in kept]
    if config["seed"] == 0:
        row["heads"] = result["heads"]
    return row


def _variation(values: list[float]) -> dict[str, float]:
    """The mean, and the standard deviation divided by the mean."""
    if len(values) < 2:
        return {}
    return {"mean": round(mean(values), 4), "variation": round(stdev(values) / mean(values), 4)}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=Path("runs/records"))
    parser.add_argument("--data", type=Path, default=Path("carry/corpora"))
    parser.add_argument("--publish", type=Path, help="also write the rows of each study to this folder")
    args = parser.parse_args(arguments)
    found = list(rows(args.records, args.data))
    for study in dict.fromkeys(row["study"] for row in found):
        if args.publish:
            save((row for row in found if row["study"] == study), args.publish / f"{study}.jsonl.gz")
        print(f"## {study}\n\n{markdown(of_study(found, study))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
