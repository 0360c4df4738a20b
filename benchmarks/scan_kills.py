"""Kill a scan at random moments, resume it, and compare its records with those of an undisturbed scan.

    python benchmarks/scan_kills.py [--model minilm] [--kills 20] [--length 64] [--texts 12]

Every process is the command that users run. Once it measures, SIGKILL ends it at a random moment within half of the
undisturbed measuring time. When all texts are measured, the records are compared bit for bit, and another scan starts,
until there were enough kills. Counts kills that lost a text already written (there should be none), and temporary files
left behind. Needs heedful[hf,report].
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        assert command(options, whole).wait() == 0, "a scan that was left alone failed"
        span = (whole / "rows.jsonl.gz").stat().st_mtime - (whole / "scan.json").stat().st_mtime
        kills = lost = scans = differing = 0
        while kills < options.kills:
            out = Path(scratch) / str(scans)
            found = killed_until_done(options, out, draw, span, options.kills - kills)
            kills, lost, scans = kills + found[0], lost + found[1], scans + 1
            differing += not equal(whole, out)
        print(
            f"{options.model}, {options.texts} texts of {options.length} tokens, {span:.1f} s of measuring: {kills} "
            f"kills in {scans} scans, {differing} scans differ, {lost} kills lost a text that was written."
        )
    sys.exit(bool(lost or differing))


def command(options: argparse.Namespace, out: Path) -> subprocess.Popen:
    arguments = ["scan", options.model, "--lengths", options.length, "--texts-count", options.texts, "--out", out]
    line = [sys.executable, "-m", "heedful", *map(str, arguments), "--resume", "--json"]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL)


def parts(out: Path) -> set[tuple[str, int]]:
    from heedful.store.scans import Run

    return Run.open(out).done() if (out / "scan.json").exists() else set()


def killed_until_done(
    options: argparse.Namespace, out: Path, draw: random.Random, span: float, most: int
) -> tuple[int, int]:
    """The number of kills, and how many of them lost a text."""
    kills = lost = 0
    while True:
        before = len(parts(out))
        process = command(options, out)
        if kills >= most or before == options.texts:
            assert process.wait() == 0, "a scan that was resumed failed"
            return kills, lost
        wait_until_it_measures(process, out, time.time())
        try:
            moment = draw.random() * span / 2
            assert process.wait(moment) == 0, "a scan that was resumed failed"
            return kills, lost
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        kills += 1
        lost += len(parts(out)) < before
        print(f"killed after {moment:5.2f} s of measuring, with {len(parts(out))} texts written", flush=True)


def wait_until_it_measures(process: subprocess.Popen, out: Path, begun: float) -> None:
    """Wait until the scan measures: then it has written the manifest, or rewritten it if it was resumed."""
    manifest = out / "scan.json"
    while process.poll() is None and not (manifest.exists() and manifest.stat().st_mtime >= begun):
        time.sleep(0.005)


def equal(whole: Path, killed: Path) -> bool:
    from heedful.scan import Scan
    from heedful.store.scans import UNTIMED

    one, two = Scan.open(whole), Scan.open(killed)
    drafts = [path for path in killed.rglob("*") if path.name.startswith(".draft")]
    same = one.rows.select(UNTIMED).equals(two.rows.select(UNTIMED))
    return same and one.thumbnails().equals(two.thumbnails()) and not drafts


if __name__ == "__main__":
    main()
