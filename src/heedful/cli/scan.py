"""`heedful scan` and `heedful report`: the heads of a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from heedful.cli.answers import AsJson, check_limits, fail, print_json
from heedful.cli.messages import print_notice, waiting


def scan_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="minilm, smollm2, a folder, a .gguf file, or a name on the hub.")
    ],
    texts: Annotated[
        list[Path] | None, typer.Option("--texts", metavar="FILE", help="A text; repeatable.  [default: heedful's own]")
    ] = None,
    texts_count: Annotated[
        int | None, typer.Option("--texts-count", help="Number of texts; a long file is cut into several.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", metavar="N,N…", help="Tokens to read.  [default: 512; of files, all]"),
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="L,L-L…", help="Layers to measure, from 0.  [default: all]")
    ] = None,
    precision: Annotated[
        float | None, typer.Option("--precision", help="Add texts until the mean rank is ± this share of itself.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="MODEL", help="Compare with this model, on the same texts.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for the records.  [default: runs/MODEL]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the scan in --out.")] = False,
    engine: Annotated[
        str, typer.Option("--engine", help="local; processes, or ray (a cluster), which share the texts.")
    ] = "local",
    address: Annotated[str | None, typer.Option("--address", help="Address of a running Ray cluster.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Number of processes.")] = None,
    memory: Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="Memory limit, such as 4G.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Run the model in float32, bfloat16 or float16.  [default: as stored]"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of random starts and random heads.")] = 0,
    budget: Annotated[int, typer.Option("--budget", help="Matrix products per head; more narrow the bounds.")] = 208,
    beyond: Annotated[
        bool, typer.Option("--beyond-positions", help="Read more tokens than the model was trained on.")
    ] = False,
    remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read weights that are no safetensors: they can run anything.")
    ] = False,
    allow_random: Annotated[
        bool, typer.Option("--allow-random", help="Measure a model whose weights are not all stored.")
    ] = False,
    allow_unknown: Annotated[
        bool, typer.Option("--allow-unknown", help="Read texts of mostly unknown tokens.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure every head of a Hugging Face model.

    Records are written after each text; a scan that was interrupted goes on with --resume and loses nothing.
    `heedful report DIR` makes a page of them. docs/scan.md says what each number means.

    \b
    heedful scan minilm
    heedful scan smollm2 --lengths 256,512,1024 --precision 0.05
    heedful scan ./tuned --against ./base --texts book.txt --lengths 1024
    """
    check_limits({"--seed": seed, "--texts-count": 1 if texts_count is None else texts_count, "--budget": budget})
    given = _numbers("--lengths", lengths)
    folder = out or Path("runs") / Path(model).name
    with _told(), _noted():
        with waiting("importing torch and transformers", shown=not as_json) as tell_what:
            from heedful import hf
            from heedful.cli.scan_terminal import print_scan, progress_bar
            from heedful.hf.load import quiet
            from heedful.scan import Execution, ScanOptions, scan
            from heedful.scan.memory import keep_pages, parse

            quiet()
            keep_pages()
            _check_device(device)
            limit = None if memory is None else parse(memory)
            load = partial(
                hf.load, dtype=dtype, pickle=allow_pickle, remote_code=remote_code, allow_random=allow_random,
                progress=tell_what,
            )  # fmt: skip
            network, tokenizer = load(model)
            other = None if against is None else load(against)
        read, titles, given = _texts(texts or [], texts_count, given, hf.longest(network))
        with progress_bar(f"scanning {Path(model).name}", shown=not as_json) as tell:
            options = ScanOptions(
                layers=_numbers("--layers", layers),
                against=other,
                precision=precision,
                budget=budget,
                seed=seed,
                beyond=beyond,
                allow_unknown=allow_unknown,
                name=model,
                against_name=against,
                titles=titles,
            )
            execution = Execution(device, limit, engine, address, workers, tell)  # type: ignore[arg-type]
            found = scan(
                network, tokenizer, read, lengths=given, out=folder, resume=resume, options=options,
                execution=execution,
            )  # fmt: skip
        if as_json:
            print_json((found.table() if found.against is None else found.compare(found.against)).to_dicts())
            return
        print_scan(found)
        typer.echo(f"\nRecords: {folder}. A page of them: heedful report {folder}")


def report_command(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a scan.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="[OTHER]", help="Another scan of the same texts, to compare with.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The page to write.  [default: DIR/report.html]")
    ] = None,
    language: Annotated[str, typer.Option("--language", help="en or zh.")] = "en",
) -> None:
    """Make one HTML page of a scan, or of two.

    \b
    heedful report runs/minilm
    heedful report runs/tuned runs/base --out compare.html --language zh
    """
    if language not in ("en", "zh"):
        fail(f"--language {language}: expected en or zh.")
    path = out or run / "report.html"
    with _told():
        from heedful.scan import Scan

        against = None if other is None else Scan.open(other)
        Scan.open(run).report(path, against=against, language=language)  # type: ignore[arg-type]
    typer.echo(str(path))


@contextmanager
def _told() -> Iterator[None]:
    """Turn errors of a scan into a message: exit code 2 for a user's mistake, 1 if the system refused something."""
    try:
        yield
    except typer.Exit:  # the message is already printed
        raise
    except KeyboardInterrupt:
        fail("stopped. What was measured is kept: --resume goes on.", code=130)
    except ModuleNotFoundError as missing:
        fail(str(missing), code=1)
    except ValueError as mistake:
        fail(_flags(str(mistake)))
    except (OSError, MemoryError) as refusal:
        said = refusal.strerror if isinstance(refusal, OSError) and refusal.strerror else str(refusal)
        fail(_flags(said), code=1)
    except RuntimeError as failure:
        fail(str(failure).strip().partition("\n")[0], code=1)


@contextmanager
def _noted() -> Iterator[None]:
    """Print warnings to stderr as they come: notices, and damaged records that were set aside."""

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        print_notice(str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


FLAGS = {
    "pickle=True": "--allow-pickle",
    "remote_code=True": "--trust-remote-code",
    "allow_random=True": "--allow-random",
    "allow_unknown=True": "--allow-unknown",
}


def _flags(sentence: str) -> str:
    """Replace names of Python options in a message by the names of the flags."""
    for name, flag in FLAGS.items():
        sentence = sentence.replace(name, flag)
    return sentence


def _numbers(flag: str, text: str | None) -> list[int] | None:
    """Parse a list of numbers: "1,4-6" gives [1, 4, 5, 6]."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            fail(f"{flag} {text}: expected numbers such as 256,512 or 0,4-6.")
        found += range(int(first), int(last or first) + 1)
    return found


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        fail(f"--device {device}: expected cpu or cuda.")
    if kind == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch finds no GPU here.", code=1)


def _read_files(paths: list[Path]) -> tuple[list[str], list[str] | None]:
    read = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            fail(f"--texts {path}: no text in UTF-8.")
        except OSError as refusal:
            fail(f"--texts {path}: can't be read: {refusal.strerror or refusal}.")
        if not text.strip():
            fail(f"--texts {path}: empty, expected at least one word.")
        read.append(text)
    return read, [path.name for path in paths] or None


def _texts(
    paths: list[Path], count: int | None, lengths: list[int] | None, longest: int | None
) -> tuple[list[str] | None, list[str] | None, list[int] | None]:
    """Texts, titles and lengths; None for those that the scan chooses itself."""
    from heedful.scan.texts import builtin

    read, titles = _read_files(paths)
    if count is None:
        return read or None, titles, lengths
    length = max(lengths or [512])
    if titles is None:
        return builtin(length, count), None, lengths or [min(512, longest or 512)]
    return *_cut(read, titles, count, length), lengths


def _cut(read: list[str], titles: list[str], count: int, length: int) -> tuple[list[str], list[str]]:
    """Cut `count` texts out of the files, spread over them as evenly as possible."""
    from heedful.scan.texts import pieces

    parts = [
        (f"{title} {at}", part)
        for title, text in zip(titles, read, strict=True)
        for at, part in enumerate(pieces(text, length, -(-count // len(read))))
    ]
    if len(parts) < count:
        fail(
            f"--texts-count {count}: the files hold {len(parts)} texts of {length} tokens. Give more, or fewer tokens."
        )
    return [part for _, part in parts[:count]], [title for title, _ in parts[:count]]
