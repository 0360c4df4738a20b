"""Score the translations of recorded runs: `python -m heedful.studies.score --records carry/records`.

BLEU and chrF are those of sacreBLEU, with their signatures; beside them stand what a broken model would show: outputs
that are empty, or copies of the source.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from heedful.studies.records import read

BASELINES = {"fixed-heads": "8L", "frozen-projections": "learned"}
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantile of Student's t for 1, 2 … 9 degrees of freedom."""


def score(outputs: list[str], sources: list[str], references: list[str]) -> dict[str, Any]:
    """BLEU, chrF, and the shares of outputs that are empty or copies."""
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


def rows(folder: Path, data: Path) -> Iterable[dict[str, Any]]:
    """One row for each recorded run: its config, scores on both tests, losses, weights and times."""
    configs: dict[str, dict[str, Any]] = {}
    norms: dict[str, list[float]] = {}
    seen: set[str] = set()
    for line in read(folder):
        run = line["run"]
        if line["kind"] == "config":
            configs[run], norms[run] = line["config"], []
        elif line["kind"] == "steps":
            norms[run] += line["norm"]
        elif line["kind"] == "result" and run not in seen:
            seen.add(run)
            config = configs[run]
            source, target = config["direction"].split("-")
            tests = {
                name: score(outputs, *(_lines(data / config["corpus"] / f"{name}.{x}.txt") for x in (source, target)))
                for name, outputs in line["outputs"].items()
            }
            kept = ("weights", "losses", "step_seconds", "train_seconds", "optimiser_bytes", "peak_bytes")
            early, late = (norms[run][part] for part in (slice(20, 200), slice(-200, None)))
            yield {
                "run": run,
                **{name: config[name] for name in ("study", "cell", "corpus", "direction", "seed", "shuffled")},
                "tests": tests,
                **{name: line[name] for name in kept},
                "norm": {"early": _spread(early), "late": _spread(late)},
            }


def _spread(values: list[float]) -> dict[str, float]:
    """Mean, and standard deviation over the mean."""
    if len(values) < 2:
        return {}
    return {"mean": round(mean(values), 4), "variation": round(stdev(values) / mean(values), 4)}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def half_width(values: list[float]) -> float | None:
    """Half of the 95 % interval of a mean by Student's t; None for a single value.

    >>> round(half_width([1.0, 2.0, 3.0]), 3)
    2.484
    """
    if len(values) < 2:
        return None
    return T95[min(len(values) - 2, len(T95) - 1)] * stdev(values) / len(values) ** 0.5


def difference(some: list[dict[str, Any]], base: list[dict[str, Any]], test: str = "test") -> str:
    """BLEU of a cell less that of the baseline, paired by seed, with its 95 % interval."""
    known = {row["seed"]: row["tests"][test]["bleu"] for row in base}
    gaps = [row["tests"][test]["bleu"] - known[row["seed"]] for row in some if row["seed"] in known]
    if not gaps or some is base:
        return ""
    half = half_width(gaps)
    return f"{mean(gaps):+.2f}" + ("" if half is None else f" ± {half:.2f}")


def table(found: list[dict[str, Any]]) -> str:
    """Means over seeds with standard deviations, and differences to the baseline of each corpus, as Markdown."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in found:
        kind = row["study"], row["corpus"], row["direction"], row["cell"], row["shuffled"]
        groups.setdefault(kind, []).append(row)

    def cell(values: list[float], digits: int = 2) -> str:
        spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{mean(values):.{digits}f}{spread}"

    lines = [
        "| corpus | cell | seeds | BLEU | to the baseline (95 %) | BLEU, unseen packages | to the baseline (95 %) "
        "| chrF | train loss | test loss | ms a step |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (study, corpus, direction, name, shuffled), some in sorted(groups.items()):
        base = groups.get((study, corpus, direction, BASELINES.get(study, ""), False), [])
        columns = [
            f"{corpus} {direction}",
            name + (" (shuffled)" if shuffled else ""),
            str(len(some)),
            cell([row["tests"]["test"]["bleu"] for row in some]),
            difference(some, base),
            cell([row["tests"]["test_unseen"]["bleu"] for row in some]),
            difference(some, base, "test_unseen"),
            cell([row["tests"]["test"]["chrf"] for row in some]),
            cell([row["losses"]["train"] for row in some], 3),
            cell([row["losses"]["test"] for row in some], 3),
            cell([1e3 * row["step_seconds"] for row in some], 1),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=Path("runs/records"))
    parser.add_argument("--data", type=Path, default=Path("carry/corpora"))
    parser.add_argument("--out", type=Path, help="also write the rows, as JSON lines")
    args = parser.parse_args(arguments)
    found = list(rows(args.records, args.data))
    if args.out:
        args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
