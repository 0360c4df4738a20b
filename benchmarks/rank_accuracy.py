"""Compare the ranks of a scan with dense float64 decompositions, on texts that were not used to tune anything.

    apt-get download anarchism debian-handbook emacs-el fortunes jargon perl-doc postgresql-doc-15 python3.11-doc
    python benchmarks/rank_accuracy.py . [--case minilm:128,256,512 --case smollm2:256,512,1024]

takes one file from each Debian package in the folder (UNSEEN), scans the texts as the command does, and prints, for
each model and length: heads whose rank is within 5 % of the true rank, the mean signed error with its 95 % interval
(texts are the unit: heads of one text are not independent), the worst heads, and true ranks outside their certified
interval. `--calibration` uses the texts on which the constants of `measures.profile` were chosen; tune those constants
on these texts only.

Dense float64 spectra take 0.2 s of a core for each head of 1024 tokens, a minute for each text of SmolLM2. They are
cached under runs/ranks, one file per text, model, length and layer. So an interrupted run continues, and comparing
another estimate takes only the time of a scan. Needs heedful[hf,report] and dpkg-deb.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import io
import re
import subprocess
import tarfile
import tempfile
from math import sqrt
from pathlib import Path

import torch

import heedful as h

RUNS = Path("runs/ranks")
SKIPPED, KEPT = 4000, 20_000  # characters of a file; titles and licences come first
UNSEEN = {
    "anarchism": "usr/share/doc/anarchism/markdown/secA4.md.gz",  # political prose
    "debian-handbook": "usr/share/doc/debian-handbook/html/de-DE/sect.virtualization.html",  # German
    "emacs-el": "usr/share/emacs/28.2/lisp/org/org-agenda.el.gz",  # Lisp
    "fortunes": "usr/share/games/fortunes/wisdom",  # sayings
    "jargon": "usr/share/info/jargon.info.gz",
    "perl-doc": "usr/share/perl/5.36.0/pod/perlfaq5.pod",
    "postgresql-doc-15": "usr/share/doc/postgresql-doc-15/html/pgbench.html",
    "python3.11-doc": "usr/share/doc/python3.11/html/_sources/library/re.rst.txt",
}
CALIBRATION = {
    "debian-policy": "usr/share/doc/debian-policy/policy.html/_sources/upgrading-checklist.rst.txt",
    "git-doc": "usr/share/doc/git-doc/git-rev-list.html",
    "linux-doc-6.1": "usr/share/doc/linux-doc-6.1/Documentation/memory-barriers.txt.gz",
    "nethack-common": "usr/share/doc/nethack-common/Guidebook.txt.gz",
}
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # 97.5 % quantile, by the number of texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, help="folder with the .deb files")
    parser.add_argument("--case", action="append", metavar="MODEL:LENGTHS")
    parser.add_argument("--calibration", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="take layers 0, EVERY, 2 EVERY, … alone")
    parser.add_argument("--texts", help="names of packages, with commas: these alone")
    options = parser.parse_args()
    chosen = CALIBRATION if options.calibration else UNSEEN
    names = options.texts.split(",") if options.texts else list(chosen)
    texts = {name: unpacked(options.packages, name, chosen[name]) for name in names}
    print("| model | N | heads | τ | within 5 % | mean error, 95 % interval | worst | outside the bounds |")
    print("|---|---|---|---|---|---|---|---|")
    worst: list[str] = []
    for case in options.case or ["minilm:128,256,512", "smollm2:256,512,1024"]:
        model, _, lengths = case.partition(":")
        worst += compare(model, list(map(int, lengths.split(","))), texts, options.every)
    print("\n" + "\n".join(worst))


def unpacked(folder: Path, package: str, path: str) -> str:
    """A passage of one file of a package, without markup."""
    found = sorted(folder.glob(f"{package}_*.deb"))
    if not found:
        raise SystemExit(f"{folder}: no package {package}. Run apt-get download {package} there.")
    archive = subprocess.run(["dpkg-deb", "--fsys-tarfile", found[-1]], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        file = files.extractfile("./" + path)
        assert file is not None, f"{found[-1]}: no file {path}"
        raw = file.read()
    text = (gzip.decompress(raw) if path.endswith(".gz") else raw).decode("utf-8", "replace")
    if path.endswith(".html"):
        text = re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL)
        text = html.unescape(re.sub(r"<[^>]*>", "", text))
    return text.replace("\r\n", "\n")[SKIPPED : SKIPPED + KEPT]


def compare(name: str, lengths: list[int], texts: dict[str, str], every: int) -> list[str]:
    """Print a row for each length and share; return lines about the worst heads."""
    from heedful import hf
    from heedful.hf.load import quiet

    quiet()
    model, tokenizer = hf.load(name)
    true = {
        (length, text): truth(name, model, tokenizer, words, length, every)
        for length in lengths
        for text, words in texts.items()
    }
    return table(name, lengths, list(texts), scanned(model, tokenizer, lengths, texts, every), true)


def scanned(model, tokenizer, lengths: list[int], texts: dict[str, str], every: int) -> list[dict]:
    """The ranks from a scan."""
    from heedful import hf
    from heedful.scan.worker import survey

    calls = survey(hf.Probe(model), hf.encode(model, tokenizer, next(iter(texts.values())), min(lengths)))
    layers = [call["layer"] for call in calls][::every]
    names = [f"rank{tau}{end}" for tau in (90, 95) for end in ("", "_low", "_high")]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        scan = hf.scan(
            model, tokenizer, list(texts.values()), lengths=lengths, out=out, options=hf.ScanOptions(layers=layers)
        )
        return scan.rows.select("text", "length", "layer", "head", *names).to_dicts()


def table(name: str, lengths: list[int], texts: list[str], rows: list[dict], true: dict) -> list[str]:
    lines = []
    for length in lengths:
        for tau in (90, 95):
            errors: dict[str, list[float]] = {text: [] for text in texts}
            heads, outside = [], 0
            for row in rows:
                if row["length"] != length:
                    continue
                text = texts[int(row["text"])]
                sums = true[length, text][row["layer"]][row["head"]].cumsum(-1)
                rank = int((sums < tau / 100 * sums[-1]).sum()) + 1
                found, low, high = (int(row[f"rank{tau}{end}"]) for end in ("", "_low", "_high"))
                errors[text].append((found - rank) / rank)
                outside += not low <= rank <= high
                heads.append((abs(found - rank) / rank, text, row["layer"], row["head"], found, rank))
            every = [error for part in errors.values() for error in part]
            near = sum(abs(error) <= 0.05 for error in every) / len(every)
            mean, half = interval([sum(part) / len(part) for part in errors.values()])
            print(
                f"| {name} | {length} | {len(every)} | .{tau} | {near:.1%} | {mean:+.3%} ± {half:.3%} | "
                f"{min(every):+.1%} to {max(every):+.1%} | {outside} |",
                flush=True,
            )
            lines += [
                f"{name}, {length} tokens, {text}, layer {layer} head {head}: rank(.{tau}) {found}, truth {rank}"
                for error, text, layer, head, found, rank in sorted(heads, reverse=True)[:3]
                if error > 0
            ]
    return lines


def interval(means: list[float]) -> tuple[float, float]:
    """The mean over texts, and the half width of its 95 % interval."""
    count = len(means)
    mean = sum(means) / count
    if count < 2:
        return mean, float("inf")
    spread = sqrt(sum((x - mean) ** 2 for x in means) / (count - 1))
    return mean, STUDENT.get(count, 1.96) * spread / sqrt(count)


def truth(name: str, model, tokenizer, text: str, length: int, every: int) -> dict[int, torch.Tensor]:
    """σ² of the heads in float64, (heads, length) by layer, from the model's own queries and keys."""
    from heedful import hf

    folder = RUNS / f"{name}-{length}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[int, torch.Tensor] = {}

    def visit(call: hf.Call) -> None:
        path = folder / f"{call.at}.pt"
        if call.at % every:
            return
        if not path.exists():
            mechanism = h.Softmax(call.pattern, scale=call.scale)
            q, k = call.q[0].double(), call.per_head(call.k)[0].double()
            heads = [mechanism.matrix(*head) for head in zip(q, k, strict=True)]
            squares = [torch.linalg.eigvalsh(head @ head.mT).flip(-1).clamp(min=0) for head in heads]
            torch.save(torch.stack(squares), path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        found[call.at] = torch.load(path)

    hf.Probe(model)(hf.encode(model, tokenizer, text, length), visit)
    return found


if __name__ == "__main__":
    main()
