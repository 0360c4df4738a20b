"""The command line: what people see, what programs read, and what a mistake gets."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from PIL import Image
from rich.cells import cell_len
from typer.testing import CliRunner

import heedful
from heedful.cli.app import app
from heedful.cli.catalogue_markdown import catalogue_markdown
from heedful.cli.mechanism_facts import SMALL_WIDTH
from heedful.mechanisms import CATALOG

FACTS = {
    "name", "family", "summary", "paper", "year", "complexity", "causal", "causal_is_optional", "streaming", "kernels"
}  # fmt: skip

QUICK = ("--n", 256)
"""Counting the pairs of a pattern takes a while at the default length."""


def run(*arguments, columns=80):
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": str(columns)}, prog_name="heedful")


def said(result):
    """What was written to stderr, on one line."""
    return " ".join(result.stderr.split())


def widest(text):
    return max(cell_len(line) for line in text.splitlines())


def test_alone_it_prints_help():
    result = run()
    assert result.exit_code == 0
    assert "list" in result.output and "show" in result.output and "Usage: heedful" in result.output


def test_version():
    assert run("--version").output == f"heedful {heedful.__version__}\n"


LIGHT = """
import os, sys
from heedful.cli.app import app, main

def run(*arguments):
    sys.argv = ["heedful", *arguments]
    try:
        main()
    except SystemExit as done:
        assert not done.code, (arguments, done.code)

run("--version")
run("--help")
for command in app.registered_commands:
    run(command.name, "--help")
run("--show-completion", "bash")
os.environ |= {"_HEEDFUL_COMPLETE": "complete_bash", "COMP_WORDS": "heedful sc", "COMP_CWORD": "1"}
run()
print("imported:", *sorted({"torch", "numpy", "transformers", "polars"} & set(sys.modules)), file=sys.stderr)
"""


def test_version_help_and_completion_do_not_import_torch():
    env = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # there may be no shell above the tests
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and done.stderr == "imported:\n", done.stderr
    assert done.stdout.startswith(f"heedful {heedful.__version__}\n") and done.stdout.endswith("\nscan\n")


def test_a_name_is_imported_when_it_is_first_asked_for():
    script = "import sys, heedful as h; assert 'torch' not in sys.modules; h.Softmax, h.patterns.Full; h.nothing"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.endswith("AttributeError: module 'heedful' has no attribute 'nothing'\n"), done.stderr
    assert set(heedful.__all__) <= set(dir(heedful)) and "Softmax" in heedful.__all__


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("list",),
        ("show", *QUICK),
        *(("show", name, *QUICK) for name in CATALOG),
    ],
)
def test_everything_fits_eighty_columns(arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert widest(result.output) <= 80
    assert not re.search(r"\w…", result.output), "a word was cut off"


@pytest.mark.parametrize("command", [command.name for command in app.registered_commands])
def test_the_help_of_every_command_fits_eighty_columns(command):
    result = run(command, "--help")
    assert result.exit_code == 0 and f"Usage: heedful {command}" in result.output
    assert widest(result.output) <= 80


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
def test_the_list_names_every_entry_whole_at_any_width(columns):
    output = run("list", columns=columns).output
    assert widest(output) <= columns
    for name, entry in CATALOG.items():
        assert re.search(rf"^{re.escape(name)}(?!\S)", output, re.MULTILINE)
        assert entry.family in output


def test_the_list_of_one_family():
    output = run("list", "--family", "sparse").output
    assert "window-sinks" in output and "relu2" not in output


def test_the_list_as_json_is_flat_and_true():
    rows = json.loads(run("list", "--json").stdout)
    assert [row["name"] for row in rows] == list(CATALOG)
    for row in rows:
        assert row.keys() == FACTS
        assert all(isinstance(value, (str, int, bool)) for value in row.values())
    by_name = {row["name"]: row for row in rows}
    assert by_name["window"]["causal"] and not by_name["bigbird"]["causal"]
    assert by_name["softmax"]["causal_is_optional"] and not by_name["bigbird"]["causal_is_optional"]
    assert by_name["softmax"]["kernels"].split(", ") == list(heedful.Softmax.kernel.backends)
    assert by_name["softmax"]["streaming"] and by_name["softmax"]["year"] == 2017


def test_the_list_as_markdown_is_the_table_and_nothing_else():
    assert run("list", "--markdown").stdout == catalogue_markdown() + "\n"
    assert run("list", "--markdown", "--family", "exact").stdout == catalogue_markdown(family="exact") + "\n"


def test_show_tells_mathematics_options_cost_and_draws():
    output = run("show", "window-sinks", "--n", 1024, "--heads", 8).output
    for part in (
        "A_ij = exp",
        "recurrence",
        "Xiao",
        "before",
        "512",
        "n = 1024",
        "8 heads",
        "sdpa",
        "blank: exactly 0",
    ):
        assert part in output
    assert re.search(r"^[░▒▓█]{2}   +░", output.replace("▒", "░"), re.MULTILINE)  # sinks, a gap, the window


def test_the_cost_shown_is_the_cost():
    page = json.loads(
        run("show", "window", "--n", 2048, "--d", 32, "--heads", 4, "--option", "before=100", "--json").stdout
    )
    dims = heedful.Dims(2048, 2048, 32, 32, batch=4)
    cost = heedful.build("window", before=100).cost(dims)
    assert (page["flops"], page["bytes"], page["state"]) == (cost.flops, cost.bytes, cost.state)
    assert page["dense_flops"] == heedful.Softmax(heedful.Causal()).cost(dims).flops
    assert page["options"]["before"] == 100 and page["options"]["sinks"] == 0


def test_stages_of_a_layer_are_shown_and_add_up():
    page = json.loads(run("show", "window", "--n", 2048, "--d", 32, "--heads", 4, "--stages", "--json").stdout)
    assert [stage["name"] for stage in page["stages"]] == [
        "projections",
        "scores",
        "softmax",
        "aggregation",
        "output projection",
    ]
    assert sum(stage["flops"] for stage in page["stages"]) == page["layer_flops"]
    assert page["layer_flops"] - page["flops"] == 4 * 2 * 2048 * 128**2
    shown = run("show", "window", "--n", 2048, "--d", 32, "--heads", 4, "--stages").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"projections +201 M +\S+ %", shown) and re.search(r"softmax +0 +0.0 % +\S+ M", shown)


def test_the_picture_is_of_the_mechanism_on_seeded_tokens():
    first, again, other = (
        json.loads(run("show", "blocks", "--tokens", 16, "--seed", seed, "--json").stdout)["matrix"]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    matrix = torch.tensor(first)
    assert matrix.shape == (16, 16)
    assert torch.allclose(matrix.sum(-1), torch.ones(16), atol=1e-4)
    assert (matrix[8:, :8] == 0).all() and (matrix.triu(1) == 0).all()


def test_options_reach_the_picture():
    page = json.loads(run("show", "softmax", "--option", "pattern=Window(1, 1)", "--json").stdout)
    matrix = torch.tensor(page["matrix"])
    assert (matrix.triu(2) == 0).all() and (matrix.tril(-2) == 0).all() and (matrix.diagonal(1) > 0).all()
    assert page["options"]["pattern"] == "Window(before=1, after=1, sinks=0)"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("list", "--family", "sprase"), "no family is called 'sprase'; the families are exact"),
        (("list", "--json", "--markdown"), "--json and --markdown are two answers; choose one."),
        (("show", "windw"), "no mechanism is called 'windw'; did you mean window"),
        (("show", "window", "--option", "before=x"), "expected a whole number"),
        (("show", "window", "--option", "before=99999999999999999999"), "expected a whole number"),
        (("show", "window", "--option", "before"), "expected NAME=VALUE"),
        (("show", "window", "--option", "before=-1"), "before must be an integer ≥ 0, got -1"),
        (("show", "window", "--option", "width=1"), "no option 'width'; it takes before"),
        (("show", "window", "--option", "d=1"), "sizes have flags of their own"),
        (("show", "blocks", "--option", "causal=perhaps"), "expected true or false"),
        (("show", "longformer", "--option", "tokens=a,b"), "expected whole numbers"),
        (("show", "softmax", "--option", "temperature=0"), "temperature: expected > 0"),
        (("show", "softmax", "--option", "sink=1"), "can be set from Python only"),
        (
            ("show", "softmax", "--option", "pattern=Sideways()"),
            "'Sideways()' is no pattern; patterns are Full, Causal",
        ),
        (("show", "softmax", "--option", "pattern=Window(1) &"), "is no pattern"),
        (("show", "softmax", "--option", "pattern=__import__('os')"), "is no pattern"),
        (("show", "softmax", "--option", "pattern=Window"), "expected Window(before, after, sinks)"),
        (("show", "softmax", "--option", "pattern=Window(open('x'))"), "expected Window(before, after, sinks)"),
        (("show", "softmax", "--n", "0"), "--n 0: expected 1 to"),
        (("show", "softmax", "--tokens", "99999"), "--tokens 99999: expected 1 to 4096"),
        (("show", "--png", "all.png"), "--png needs the name of one mechanism"),
        (("show", "--option", "before=1"), "--option needs the name of one mechanism"),
        (("show", "softmax", "--n", "many"), "--n"),
        (("dance",), "No such command 'dance'"),
    ],
)
def test_a_mistake_gets_a_sentence_and_exit_code_two(arguments, sentence):
    result = run(*arguments)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert sentence in said(result)
    assert result.stdout == "" and "Traceback" not in result.stderr


def test_png_draws_to_a_file(tmp_path):
    path = tmp_path / "identity.png"
    result = run("show", "identity", "--png", path)
    assert result.exit_code == 0 and f"wrote{path}" in "".join(result.output.split())
    with Image.open(path) as picture:
        assert len(picture.getcolors(maxcolors=2**24)) > 50


def test_png_and_json_leave_only_json_on_stdout(tmp_path):
    result = run("show", "window", "--json", "--png", tmp_path / "window.png")
    assert json.loads(result.stdout)["name"] == "window" and (tmp_path / "window.png").exists()


def test_json_has_no_nan():
    page = run("show", "relu2", "--option", "scale=nan", "--json").stdout
    assert json.loads(page, parse_constant=pytest.fail)["matrix"][0][0] is None


def test_a_path_that_can_not_be_written_gets_a_sentence(tmp_path):
    for path in (tmp_path / "no" / "such" / "folder.png", tmp_path):
        result = run("show", "window", "--png", path)
        assert result.exit_code == 1 and "can't write" in said(result) and result.stdout == ""


def test_without_pillow_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    result = run("show", "window", "--png", tmp_path / "window.png")
    assert result.exit_code == 1 and "pip install 'heedful[plot]'" in said(result)


def test_all_cards_show_every_mechanism():
    output = run("show", *QUICK).output
    for name, entry in CATALOG.items():
        assert name in output and entry.complexity in output
    assert json.loads(run("show", "--json", *QUICK).stdout)[0]["name"] == next(iter(CATALOG))


def test_cards_of_more_tokens_than_columns_say_that_cells_are_shared():
    assert "largest of 4 × 2 entries" in " ".join(run("show", "--tokens", 48, *QUICK).output.split())


def test_python_m_heedful_prints_json_and_nothing_else():
    done = subprocess.run(
        [sys.executable, "-m", "heedful", "list", "--json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stderr == ""
    assert [row["name"] for row in json.loads(done.stdout)] == list(CATALOG)


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")
def test_in_a_terminal_of_eighty_columns_it_draws_in_colour():
    import pty

    here, there = pty.openpty()
    env = os.environ | {"COLUMNS": "80", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    env.pop("NO_COLOR", None)
    with subprocess.Popen([sys.executable, "-m", "heedful", "show", "window-sinks"], stdout=there, env=env) as process:
        os.close(there)
        output = b""
        while True:
            try:
                chunk = os.read(here, 65536)
            except OSError:  # Linux ends a pseudo-terminal so
                break
            if not chunk:
                break
            output += chunk
    os.close(here)
    assert process.returncode == 0
    text = output.decode()
    assert "\x1b[38;2;" in text and "▀" in text
    assert widest(re.sub(r"\x1b\[[0-9;]*m", "", text)) <= 80


def test_builders_that_ask_for_sizes_or_have_required_options_are_served(monkeypatch):
    asked = []

    def needy(parents: tuple[int, ...], d: int, heads: int = 2, radius: int = 1):
        asked.append((d, heads))
        return heedful.Softmax(heedful.Tree(parents, radius))

    entry = replace(CATALOG["softmax"], name="needy", build=needy, small={"parents": (-1, 0, 1, 2)})
    monkeypatch.setitem(CATALOG, "needy", entry)
    result = run("show", "needy", "--n", 64, "--d", 8, "--heads", 3, "--option", "radius=2")
    assert result.exit_code == 0, result.output
    assert asked == [(8, 3), (SMALL_WIDTH, 1)]
    assert "parents" in result.output and "needy" in run("list").output
