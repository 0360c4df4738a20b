"""The dependency direction of docs/design.md, read off the imports themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "heedful"

# A module may import from its own layer and from the layers before it.
LAYERS = [
    {"shapes", "constants"},
    {"patterns", "segments", "words", "feature_maps", "random_features", "kernels"},
    {"validation", "core", "operator"},
    {"mechanisms"},
    {"column_slabs", "linalg", "measures", "nn", "testing", "notices", "store", "report", "executor", "plan"},
    {"hf", "theory", "scan", "studies", "bench"},
    {"library"},
    {"cli", "__main__"},
]
LAYER = {name: depth for depth, names in enumerate(LAYERS) for name in names}

# Only these reach beyond torch and the standard library when they are imported.
MAY_IMPORT = {
    "shapes": {"jaxtyping"},
    "kernels": {"triton"},
    "hf": {"transformers", "huggingface_hub", "accelerate", "peft", "safetensors"},
    "report": {"polars"},
    "store": {"polars"},
    "scan": {"polars"},
    "studies": {"polars", "sacrebleu", "tokenizers", "safetensors"},
    "cli": {"typer", "rich", "polars"},
}


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imports(path: Path) -> list[str]:
    """Dotted names that a file imports anywhere, function bodies included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def imports_at_load(path: Path) -> list[str]:
    """Top-level packages imported when the module loads, outside `if TYPE_CHECKING`."""
    found = []

    def visit(nodes):
        for node in nodes:
            if isinstance(node, ast.Import):
                found.extend(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.append(node.module.split(".")[0])
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                visit(node.orelse)
            elif isinstance(node, ast.If | ast.Try | ast.ClassDef | ast.With):
                visit(ast.iter_child_nodes(node))

    visit(ast.parse(path.read_text()).body)
    return found


def part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_its_layer_and_those_before(path):
    assert part(path) in LAYER, f"{part(path)} has no layer: give it one here and in docs/design.md"
    for name in imports(path):
        pieces = name.split(".")
        if pieces[0] == "heedful" and len(pieces) > 1 and pieces[1] in LAYER:
            assert LAYER[pieces[1]] <= LAYER[part(path)], f"{path.name} reaches up to {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_needs_only_torch_unless_its_extra_says_more(path):
    allowed = {"heedful", "torch", "__future__"} | set(sys.stdlib_module_names) | MAY_IMPORT.get(part(path), set())
    assert set(imports_at_load(path)) <= allowed


def test_only_hf_imports_transformers():
    for path in modules():
        if part(path) != "hf":
            assert not any(name.split(".")[0] == "transformers" for name in imports(path)), path


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
import heedful.nn, heedful.testing, heedful.bench.run
q, k, v = torch.randn(3, 2, 20, 4).unbind()
for name, entry in h.CATALOG.items():
    mechanism = entry.sample(d=4, heads=2, length=20)
    assert mechanism(q, k, v).shape == (2, 20, 4), name
    assert (mechanism.operator(q, k).mT @ v).shape == (2, 20, 4), name
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
