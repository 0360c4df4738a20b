"""The command `heedful`, one function a command.

Tables and pictures are for people; `--json` prints the same facts for programs, and nothing else, to stdout. What a
user got wrong is told in a sentence on stderr, with exit code 2; what the system refused, with exit code 1.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import heedful
from heedful.mechanisms import CATALOG
from heedful.show import picture, terminal
from heedful.show.markdown import catalogue_markdown
from heedful.show.options import read_options
from heedful.show.page import Page, catalogue

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def main() -> None:
    """The entry point of the installed command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Greek gets question marks, not a crash
            stream.reconfigure(errors="replace")
    app(prog_name="heedful")


@app.callback(invoke_without_command=True)
def heedful_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Measure the structure of Transformer attention, and put it to work."""
    if version:
        typer.echo(f"heedful {heedful.__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("list")
def list_command(
    family: Annotated[str | None, typer.Option(help="Only this family, such as sparse.")] = None,
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """Every attention mechanism in one table.

    \b
    complexity  of attending over N tokens
    causal      looks back only; "either": by an option; "two-way": it does not
    streams     can go token by token, as a decoder does
    kernels     implementations to choose from, the preferred one first
    """
    families = list(dict.fromkeys(entry.family for entry in CATALOG.values()))
    if family is not None and family not in families:
        _fail(f"no family is called {family!r}; the families are {', '.join(families)}.")
    if as_json and as_markdown:
        _fail("--json and --markdown are two answers; choose one.")
    if as_json:
        _print_json(catalogue(family))
    elif as_markdown:
        typer.echo(catalogue_markdown(family=family))
    else:
        terminal.print_catalogue(catalogue(family))


@app.command("show")
def show_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One from `heedful list`; all without it.")] = None,
    n: Annotated[int, typer.Option("--n", help="Tokens at which to give the cost.")] = 4096,
    d: Annotated[int, typer.Option("--d", help="Width of one head.")] = 64,
    heads: Annotated[int, typer.Option("--heads", help="Number of heads.")] = 1,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Set an option; repeatable.")
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Random tokens in the picture.  [default: 32]")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of these tokens.")] = 0,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw the matrix to a file too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a mechanism: its mathematics, cost and picture.

    Without a name: all of them, one card each. Pictures are of random tokens, under options that are small
    enough to be seen on a few dozen of them.

    \b
    heedful show window-sinks --n 16384 --option before=1024
    heedful show bigbird --tokens 96 --png bigbird.png
    heedful show softmax --option "pattern=Window(8, sinks=1)"
    """
    tokens = (24 if name is None else 32) if tokens is None else tokens
    _check_limits({"--n": n, "--d": d, "--heads": heads, "--tokens": tokens, "--seed": seed})
    if name is None:
        if option or png:
            _fail(f"{'--option' if option else '--png'} needs the name of one mechanism, as in `heedful show softmax`.")
        everything = [Page(entry, {}, n, d, heads, tokens, seed) for entry in CATALOG.values()]
        if as_json:
            _print_json([page.as_json() for page in everything])
        else:
            terminal.print_cards(everything)
        return
    try:
        if name not in CATALOG:
            heedful.build(name)
        page = Page(CATALOG[name], read_options(CATALOG[name], option or []), n, d, heads, tokens, seed)
        _ = page.mechanism, page.small_mechanism
    except (ValueError, TypeError) as mistake:
        _fail(str(mistake))
    if png is not None:
        _save(page, png)
    if as_json:
        _print_json(page.as_json())
    else:
        terminal.print_page(page, png)


@app.command("bench")
def bench_command(
    tables: Annotated[
        list[str] | None, typer.Argument(metavar="[TABLE]…", help="peers, growth, memory; all without it.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="This case or mechanism alone; repeatable.")
    ] = None,
    n: Annotated[list[int] | None, typer.Option("--n", help="Tokens; repeatable. Each table has its own.")] = None,
    heads: Annotated[
        int | None, typer.Option("--heads", help="Number of heads; memory takes one.  [default: 8; on a GPU 16]")
    ] = None,
    d: Annotated[int, typer.Option("--d", help="Width of one head.")] = 64,
    threads: Annotated[int | None, typer.Option("--threads", help="Threads of torch.  [default: torch's]")] = None,
    cpu_time: Annotated[bool, typer.Option("--cpu-time", help="Count this process's time, not the clock's.")] = False,
    budget: Annotated[float, typer.Option("--budget", help="Seconds for each contender at each length.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random tokens.")] = 0,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where rows are kept.")] = Path("bench"),
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the crossovers, as SVG.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Take rows again that are there already.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="On the GPU, in bfloat16, 16 heads; peers: fixed sizes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time mechanisms against other packages and dense softmax.

    \b
    peers   the same work by heedful, by another package and by softmax
    growth  time by length of every mechanism, and where it beats softmax
    memory  what every mechanism allocates, up to 131,072 tokens

    Rows are written as they are taken; a run that was interrupted goes on. Missing packages are named:
    `make bench` installs them.

    \b
    heedful bench peers --only window --n 2048
    heedful bench growth --plot crossover.svg
    heedful bench --gpu peers
    """
    import torch

    from heedful.bench import run as bench
    from heedful.bench.setting import Setting
    from heedful.bench.timing import Pace

    chosen = tuple(tables or bench.TABLES)
    for table in chosen:
        if table not in bench.TABLES:
            _fail(f"no table is called {table!r}; there are {', '.join(bench.TABLES)}.")
    for size in n or []:
        _check_limits({"--n": size})
    heads = (16 if gpu else 8) if heads is None else heads
    _check_limits({"--heads": heads, "--d": d, "--seed": seed, "--threads": 1 if threads is None else threads})
    if budget <= 0:
        _fail(f"--budget {budget:g}: expected a number of seconds above 0.")
    setting = Setting(heads=heads, d=d, seed=seed, clock="cpu" if cpu_time else "wall")
    setting = setting if threads is None else replace(setting, threads=threads)
    if gpu:
        setting = replace(setting, device="cuda", dtype="bfloat16")
        if not torch.cuda.is_available():
            _fail("--gpu: torch finds no GPU here. `heedful bench` without it measures the CPU.", code=1)
    sizes = tuple(sorted(set(n or [])))
    plan = bench.Plan(out, setting, chosen, tuple(only or ()), sizes, fresh, Pace(budget=budget))
    try:
        rows = bench.run(plan)
        if plot is not None:
            bench.draw(rows, plot)
    except ValueError as mistake:
        _fail(str(mistake))
    except OSError as refusal:
        _fail(f"can't write {refusal.filename}: {refusal.strerror or refusal}.", code=1)
    if as_json:
        _print_json([{"table": table, **row} for table in chosen for row in rows[table]])
    else:
        typer.echo(bench.report(rows, chosen))


@app.command("scan")
def scan_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="minilm, smollm2, a folder, a .gguf file, or a name on the hub.")
    ],
    texts: Annotated[
        list[Path] | None, typer.Option("--texts", metavar="FILE", help="A text; repeatable.  [default: heedful's own]")
    ] = None,
    texts_count: Annotated[
        int | None, typer.Option("--texts-count", help="So many texts; a long file is cut into several.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", metavar="N,N…", help="Tokens to read.  [default: 512; files whole]")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="L,L-L…", help="Attention calls, from 0.  [default: all]")
    ] = None,
    precision: Annotated[
        float | None, typer.Option("--precision", help="Add texts until the mean rank is ± this share of itself.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="MODEL", help="Compare with it, on the same texts.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where records are kept.  [default: runs/MODEL]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the scan in --out.")] = False,
    engine: Annotated[str, typer.Option("--engine", help="local, or ray: texts are spread over a cluster.")] = "local",
    address: Annotated[str | None, typer.Option("--address", help="Of a Ray cluster that is running.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Processes of --engine ray.")] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="Take no more than this, such as 4G.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option("--seed", help="Of random starts and random heads.")] = 0,
    budget: Annotated[int, typer.Option("--budget", help="Products for each head's spectrum; more is tighter.")] = 208,
    beyond: Annotated[
        bool, typer.Option("--beyond-positions", help="Read more than a rotary model was trained on.")
    ] = False,
    remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read weights that are no safetensors: they can run anything.")
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
    _check_limits({"--seed": seed, "--texts-count": 1 if texts_count is None else texts_count, "--budget": budget})
    given = _numbers("--lengths", lengths)
    folder = out or Path("runs") / Path(model).name
    with _told():
        from heedful import hf
        from heedful.hf.load import quiet
        from heedful.scan import scan
        from heedful.scan.memory import parse
        from heedful.scan.texts import builtin, pieces
        from heedful.show.scanning import print_scan, progress_bar

        quiet()
        _check_device(device)
        limit = None if memory is None else parse(memory)
        network, tokenizer = hf.load(model, pickle=allow_pickle, remote_code=remote_code)
        other = None if against is None else hf.load(against, pickle=allow_pickle, remote_code=remote_code)
        read, titles = _read_files(texts or [])
        if read and texts_count is not None:
            read, titles = _cut(read, titles, texts_count, max(given or [512]), pieces)
        elif texts_count is not None:
            read = builtin(max(given or [512]), texts_count)
            given = given or [min(512, hf.longest(network) or 512)]
        with progress_bar(f"scanning {Path(model).name}", shown=not as_json) as tell:
            found = scan(
                network,
                tokenizer,
                read or None,
                lengths=given,
                layers=_numbers("--layers", layers),
                precision=precision,
                against=other,
                out=folder,
                resume=resume,
                engine=engine,  # type: ignore[arg-type]
                address=address,
                workers=workers,
                memory=limit,
                device=device,
                seed=seed,
                budget=budget,
                beyond=beyond,
                name=model,
                against_name=against,
                titles=titles,
                progress=tell,
            )
        if as_json:
            _print_json((found.table() if found.against is None else found.compare(found.against)).to_dicts())
            return
        print_scan(found)
        if found.against is not None:
            typer.echo(f"\nAgainst {against}: {found.against.words()}")
        typer.echo(f"\nRecords: {folder}. A page of them: heedful report {folder}")


@app.command("report")
def report_command(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="Records of a scan.")],
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
        _fail(f"--language {language}: expected en or zh.")
    path = out or run / "report.html"
    with _told():
        from heedful.scan import Scan

        against = None if other is None else Scan.open(other)
        Scan.open(run).report(path, against=against, language=language)  # type: ignore[arg-type]
    typer.echo(str(path))


@contextmanager
def _told() -> Iterator[None]:
    """What goes wrong in a scan, as a sentence; what the user gave has exit code 2, what the system refused 1."""
    try:
        yield
    except typer.Exit:  # said already
        raise
    except KeyboardInterrupt:
        _fail("stopped. What was measured is kept: --resume goes on.", code=130)
    except ModuleNotFoundError as missing:
        _fail(str(missing), code=1)
    except ValueError as mistake:
        _fail(_flags(str(mistake)))
    except (OSError, MemoryError) as refusal:
        said = refusal.strerror if isinstance(refusal, OSError) and refusal.strerror else str(refusal)
        _fail(_flags(said), code=1)
    except RuntimeError as failure:
        _fail(str(failure).strip().partition("\n")[0], code=1)


def _flags(sentence: str) -> str:
    """Options of Python's by the names that they have here."""
    for name, flag in {"pickle=True": "--allow-pickle", "remote_code=True": "--trust-remote-code"}.items():
        sentence = sentence.replace(name, flag)
    return sentence


def _numbers(flag: str, text: str | None) -> list[int] | None:
    """1,4-6 as [1, 4, 5, 6]."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            _fail(f"{flag} {text}: expected numbers such as 256,512 or 0,4-6.")
        found += range(int(first), int(last or first) + 1)
    return found


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        _fail(f"--device {device}: expected cpu or cuda.")
    if kind == "cuda" and not torch.cuda.is_available():
        _fail("--device cuda: torch finds no GPU here.", code=1)


def _read_files(paths: list[Path]) -> tuple[list[str], list[str] | None]:
    read = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            _fail(f"--texts {path}: no text in UTF-8.")
        except OSError as refusal:
            _fail(f"--texts {path}: can't be read: {refusal.strerror or refusal}.")
        if not text.strip():
            _fail(f"--texts {path}: empty, expected at least one word.")
        read.append(text)
    return read, [path.name for path in paths] or None


def _cut(
    read: list[str], titles: list[str] | None, count: int, length: int, pieces: Callable[[str, int, int], list[str]]
) -> tuple[list[str], list[str]]:
    """So many texts out of the files, as evenly as they allow."""
    parts = [
        (f"{title} {at}", part)
        for title, text in zip(titles or [], read, strict=True)
        for at, part in enumerate(pieces(text, length, -(-count // len(read))))
    ]
    if len(parts) < count:
        _fail(
            f"--texts-count {count}: the files hold {len(parts)} texts of {length} tokens. Give more, or fewer tokens."
        )
    return [part for _, part in parts[:count]], [title for title, _ in parts[:count]]


@app.command("theory")
def theory_command(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]…", help="Claims, such as T11.23; all without.")
    ] = None,
    chapter: Annotated[str | None, typer.Option("--chapter", help="Only this chapter, such as low-rank.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Only this kind, such as exact or empirical.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Show those alone that fail.")] = False,
    slow: Annotated[bool, typer.Option("--all", help="Run slow claims too.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", help="Processes side by side.  [default: one a core]")] = 0,
    limit: Annotated[float, typer.Option("--limit", help="Seconds for each claim.  [default: 300, slow 1800]")] = 0,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where findings are kept.")] = Path("runs/theory"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Judge again what was judged before.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the theory book.")] = None,
    language: Annotated[str, typer.Option("--language", help="en or zh.")] = "en",
    as_json: AsJson = False,
) -> None:
    """Run the theory: every statement of the texts, with a verdict.

    Each claim has a check, and a control on which the check must come out the other way. One claim alone is told in
    full. Findings are kept as they come, so a run that was interrupted goes on, and used again while nothing has
    changed that they depend on. Exit code 1: a check could not tell a claim from its control.

    \b
    heedful theory T11.23
    heedful theory --chapter low-rank --failed
    heedful theory --all --html runs/theory.html --language zh
    """
    from heedful.show.theory import theory

    if jobs < 0 or limit < 0:
        _fail(f"{'--jobs' if jobs < 0 else '--limit'}: expected a number above 0.")
    try:
        answer = theory(
            tuple(ids or ()), chapter=chapter, kind=kind, failed=failed, slow=slow, jobs=jobs, limit=limit, out=out,
            fresh=fresh, html=html, language=language,
        )  # fmt: skip
    except ValueError as mistake:
        _fail(str(mistake))
    except OSError as refusal:
        _fail(f"can't write {refusal.filename}: {refusal.strerror or refusal}.", code=1)
    if as_json:
        _print_json(answer.records)
    else:
        answer.show()
    raise typer.Exit(answer.exit_code)


LIMITS = {
    "--texts-count": (1, 9999),
    "--budget": (64, 2**20),
    "--n": (1, 2**24),
    "--d": (1, 2**16),
    "--heads": (1, 2**16),
    "--tokens": (1, 4096),
    "--seed": (0, 2**63 - 1),
    "--threads": (1, 1024),
}


def _check_limits(given: dict[str, int]) -> None:
    for flag, value in given.items():
        least, most = LIMITS[flag]
        if not least <= value <= most:
            _fail(f"{flag} {value}: expected {least} to {most}.")


def _fail(sentence: str, code: int = 2) -> NoReturn:
    terminal.print_mistake(sentence)
    raise typer.Exit(code)


def _print_json(rows: Any) -> None:
    typer.echo(json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False))


def _save(page: Page, path: Path) -> None:
    try:
        picture.to_png(page.matrix, path, f"{page.entry.name}: {page.entry.summary}", page.drawn)
    except ImportError:
        _fail("drawing to a file needs Pillow: pip install 'heedful[plot]'", code=1)
    except OSError as refusal:
        _fail(f"can't write {path}: {refusal.strerror or refusal}.", code=1)
