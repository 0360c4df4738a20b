"""Kill a scan at random moments, resume it, and compare its records with those of a scan that was left alone.

    python benchmarks/scan_kills.py [--model minilm] [--kills 20] [--length 128] [--texts 8]

Every process is the command that users run, ended by SIGKILL at a moment drawn over half of what a whole scan takes;
the last one is left to finish. Says whether the records agree bit for bit, whether a kill took away a text that was
written, and whether drafts are left. Needs heedful[hf,report].
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
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        whole, broken = Path(scratch) / "whole", Path(scratch) / "killed"
        begin = time.monotonic()
        command(options, whole).wait()
        span = time.monotonic() - begin
        lost = kill_at_random(options, broken, span)
        final = command(options, broken)
        assert final.wait() == 0, "the scan that was left alone failed"
        report(options, whole, broken, lost, span)


def command(options: argparse.Namespace, out: Path) -> subprocess.Popen:
    arguments = ["scan", options.model, "--lengths", options.length, "--texts-count", options.texts, "--out", out]
    line = [sys.executable, "-m", "heedful", *map(str, arguments), "--resume", "--json"]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL)


def kill_at_random(options: argparse.Namespace, out: Path, span: float) -> int:
    """How many kills took a text away. A scan that comes to its end before its kill starts over, its texts removed."""
    draw = random.Random(options.seed)
    kills = lost = before = 0
    while kills < options.kills:
        process = command(options, out)
        moment = draw.uniform(0.1, 1.0) * span / 2
        try:
            process.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
            written = len(list((out / "rows").glob("*.parquet")))
            lost += written < before
            before = written
            print(f"killed after {moment:5.2f} s with {written} texts written", flush=True)
            continue
        for part in (out / "rows").iterdir():
            part.unlink()
        before = 0
    return lost


def report(options: argparse.Namespace, whole: Path, broken: Path, lost: int, span: float) -> None:
    from heedful.records import UNTIMED
    from heedful.scan import Scan

    one, two = Scan.open(whole), Scan.open(broken)
    same = one.rows.select(UNTIMED).equals(two.rows.select(UNTIMED)) and one.thumbnails().equals(two.thumbnails())
    left = [path.name for path in broken.rglob("*") if path.name.startswith(".draft")]
    print(
        f"{options.model}, {options.texts} texts of {options.length} tokens, {span:.1f} s undisturbed: "
        f"{options.kills} kills, records {'equal bit for bit' if same else 'DIFFER'}, {lost} kills lost a text, "
        f"{len(left)} drafts left."
    )
    sys.exit(bool(lost or left or not same))


if __name__ == "__main__":
    main()
