"""`heedful bench`: mechanisms against other packages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.answers import AsJson, check_limits, fail, print_json, writing


def bench_command(
    tables: Annotated[
        list[str] | None, typer.Argument(metavar="[TABLE]…", help="peers, growth, memory; without: all.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Only this case or mechanism; repeatable.")
    ] = None,
    n: Annotated[list[int] | None, typer.Option("--n", help="Tokens; repeatable. Each table has its own.")] = None,
    heads: Annotated[
        int | None, typer.Option("--heads", help="Number of heads; memory takes one.  [default: 8; on a GPU 16]")
    ] = None,
    d: Annotated[int, typer.Option("--d", help="Width of one head.")] = 64,
    threads: Annotated[int | None, typer.Option("--threads", help="Threads of torch.  [default: torch's]")] = None,
    cpu_time: Annotated[bool, typer.Option("--cpu-time", help="Count this process's time, not the clock's.")] = False,
    budget: Annotated[float, typer.Option("--budget", help="Seconds for each contender at each length.")] = 1.0,
    runs: Annotated[int, typer.Option("--runs", help="Repetitions of the table of peers; gains as ranges.")] = 1,
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
            fail(f"no table is called {table!r}; there are {', '.join(bench.TABLES)}.")
    for size in n or []:
        check_limits({"--n": size})
    heads = (16 if gpu else 8) if heads is None else heads
    check_limits({"--heads": heads, "--d": d, "--seed": seed, "--threads": 1 if threads is None else threads})
    if runs < 1:
        fail(f"--runs {runs}: expected 1 or more.")
    if budget <= 0:
        fail(f"--budget {budget:g}: expected a number of seconds above 0.")
    setting = Setting(heads=heads, d=d, seed=seed, clock="cpu" if cpu_time else "wall")
    setting = setting if threads is None else replace(setting, threads=threads)
    if gpu:
        setting = replace(setting, device="cuda", dtype="bfloat16")
        if not torch.cuda.is_available():
            fail("--gpu: torch finds no GPU here. `heedful bench` without it measures the CPU.", code=1)
    sizes = tuple(sorted(set(n or [])))
    plan = bench.BenchOptions(out, setting, chosen, tuple(only or ()), sizes, fresh, Pace(budget=budget), runs)
    with writing():
        rows = bench.run(plan)
        if plot is not None:
            bench.draw(rows, plot)
    if as_json:
        print_json([{"table": table, **row} for table in chosen for row in rows[table]])
    else:
        typer.echo(bench.report(rows, chosen))
