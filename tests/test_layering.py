"""Which part of heedful may import which, read off the imports themselves. docs/design.md has the same table."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "heedful"

# A part is a folder or a file of src/heedful; `hf/__init__` is one of its own, since it offers names of parts that are
# built on hf. A part may import itself, `heedful` (for __version__), and:
CONTRACT = [
    "shapes",
    "constants",
    "patterns",
    "segments",
    "words",
    "feature_maps",
    "random_features",
    "kernels",
    "validation",
    "core",
    "operator",
]
NUMBERS = ["column_slabs", "linalg", "measures"]
MAY_IMPORT = {
    # the contract
    "shapes": [],
    "constants": ["shapes"],
    "patterns": ["shapes"],
    "segments": ["shapes", "patterns"],
    "words": ["shapes"],
    "feature_maps": ["shapes"],
    "kernels": ["shapes", "patterns", "segments", "feature_maps"],
    "random_features": ["shapes", "constants", "feature_maps", "kernels"],
    "validation": ["shapes", "patterns", "segments"],
    "operator": ["shapes", "patterns", "segments", "kernels", "validation"],
    "core": ["shapes", "patterns", "segments", "words", "kernels", "validation", "operator"],
    "mechanisms": CONTRACT,
    # numbers of an operator, layers, laws
    "column_slabs": ["shapes", "patterns", "segments", "kernels"],
    "linalg": ["shapes", "column_slabs"],
    "measures": [*CONTRACT, "column_slabs", "linalg"],
    "nn": [*CONTRACT, "mechanisms"],
    "testing": CONTRACT,
    # records and how they are shown
    "store": [],
    "executor": [],
    "notices": [],
    "svg": [],
    "latex": [],
    "report": ["shapes", "store", "svg", "latex"],
    # models and jobs
    "hf": [*CONTRACT, "mechanisms", "notices"],
    "scan": [*CONTRACT, *NUMBERS, "mechanisms", "notices", "store", "executor", "report", "hf"],
    "bench": [*CONTRACT, *NUMBERS, "mechanisms", "nn", "store", "executor", "svg"],
    "theory": [*CONTRACT, *NUMBERS, "mechanisms", "nn", "testing", "store", "executor", "hf", "bench", "studies"],
    "studies": [*CONTRACT, *NUMBERS, "mechanisms", "nn", "store", "executor", "report", "svg"],
    # what users import and run
    "hf/__init__": ["hf", "scan"],
    "library": [*CONTRACT, "measures", "mechanisms", "nn", "testing", "theory"],
    "__init__": ["library"],
    "cli": [
        *CONTRACT,
        "mechanisms",
        "nn",
        "store",
        "latex",
        "report",
        "notices",
        "hf",
        "hf/__init__",
        "scan",
        "bench",
        "studies",
        "theory",
        "studies",
    ],
    "__main__": ["cli"],
}

# Modules imported by a name that is not written there: Triton backends, the chapters of any theory, parts of `heedful`.
BY_NAME = {"heedful", "heedful.kernels.dispatch", "heedful.theory.registry"}

# Only these reach beyond torch and the standard library when they are imported.
EXTRAS = {
    "shapes": {"jaxtyping"},
    "kernels": {"triton"},
    "hf": {"transformers", "huggingface_hub", "accelerate", "peft", "safetensors"},
    "hf/__init__": {"transformers"},
    "report": {"polars"},
    "store": {"polars"},
    "scan": {"polars"},
    "studies": {"polars", "sacrebleu", "tokenizers", "safetensors"},
    "cli": {"typer", "rich", "polars"},
}
TORCH_FREE = {"store", "notices", "svg", "latex"}
"""Parts that do not even need torch."""


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def part(name: str) -> str:
    """The row of the table that a module belongs to."""
    if name in ("heedful", "heedful.hf"):
        return {"heedful": "__init__", "heedful.hf": "hf/__init__"}[name]
    return name.split(".")[1]


@cache
def imports(name: str) -> list[tuple[str, str, bool]]:
    """(module, name taken from it, whether that happens at load) for each import of a file, inside functions too.

    What stands under `if TYPE_CHECKING` is not imported.
    """
    found = []

    def visit(node: ast.AST, at_load: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                visit(other, at_load)
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, "", at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are written in full"
            found.extend((node.module, alias.name, at_load) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            written = isinstance(node.args[0], ast.Constant)
            assert written or name in BY_NAME, f"{name} imports a module by a name that is not written there"
            if written:
                found.append((node.args[0].value, "", False))
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, at_load and not inside)

    visit(ast.parse(modules()[name].read_text()), True)
    return found


@cache
def edges(name: str) -> set[str]:
    """The modules of heedful that a module imports."""
    found = set()
    for module, taken, _ in imports(name):
        target = f"{module}.{taken}" if f"{module}.{taken}" in modules() else module
        if target in modules() and not (target == "heedful" and (taken or module == "heedful")):
            found.add(target)
    return found - {name}


def violations(table: dict[str, list[str]]) -> list[str]:
    """Imports that the table does not allow."""
    return [
        f"{name} imports {target}"
        for name in modules()
        for target in edges(name)
        if part(target) not in {part(name), *table.get(part(name), ())}
    ]


def test_every_part_is_in_the_table_and_imports_what_it_may():
    assert {part(name) for name in modules()} == set(MAY_IMPORT), "a part has no row, or a row no part"
    assert violations(MAY_IMPORT) == []
    assert "heedful.scan.run imports heedful.hf.probe" in violations({**MAY_IMPORT, "scan": []}), "the check is blind"


def test_no_module_reaches_itself():
    """Neither by imports at load, nor inside functions, nor by import_module."""
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a cycle: {' → '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for target in edges(name):
                walk(target, (*path, name))
            done.add(name)

    for name in modules():
        walk(name, ())


def test_the_table_has_no_cycle_either():
    left = {name: set(allowed) - {name} for name, allowed in MAY_IMPORT.items()}
    while left:
        free = {name for name, allowed in left.items() if not allowed & left.keys()}
        assert free, f"cycle among {sorted(left)}"
        left = {name: allowed for name, allowed in left.items() if name not in free}


def test_no_private_name_is_imported_from_another_module():
    private = [
        f"{name}: {module}.{taken}"
        for name in modules()
        for module, taken, _ in imports(name)
        if module.split(".")[0] == "heedful" and taken.startswith("_") and taken != "__version__"
    ]
    assert private == []


def test_a_module_needs_only_torch_unless_its_extra_says_more():
    for name in modules():
        basic = {"heedful", "__future__", *sys.stdlib_module_names}
        allowed = basic | EXTRAS.get(part(name), set()) | (set() if part(name) in TORCH_FREE else {"torch"})
        loaded = {module.split(".")[0] for module, _, at_load in imports(name) if at_load}
        assert loaded <= allowed, f"{name} imports {sorted(loaded - allowed)}"


def test_only_hf_imports_transformers():
    users = {part(name) for name in modules() for module, *_ in imports(name) if module.split(".")[0] == "transformers"}
    assert users == {"hf", "hf/__init__"}


def test_the_library_runs_with_torch_alone():
    """A process in which every other package refuses to be imported."""
    script = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"jaxtyping", "beartype", "rich", "typer", "PIL", "triton", "transformers", "polars"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
import torch
import heedful as h
import heedful.nn, heedful.testing, heedful.bench.run, heedful.theory.run
q, k, v = torch.randn(3, 2, 20, 4).unbind()
for name, entry in h.CATALOG.items():
    mechanism = entry.sample(d=4, heads=2, length=20)
    assert mechanism(q, k, v).shape == (2, 20, 4), name
    assert (mechanism.operator(q, k).mT @ v).shape == (2, 20, 4), name
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
