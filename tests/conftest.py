"""Enforce the library's annotations in tests that request it.

jaxtyping's import hook wraps every function of the modules below before anything imports them; beartype checks shapes
and types at each call. Checking is on only under the `annotations_enforced` fixture, because the library has its own
error messages for bad input, and tests of these messages must reach them.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import jaxtyping
import pytest
from beartype import BeartypeConf, beartype

# Without a GPU, kernels run in Triton's interpreter; Triton reads this variable when it is first imported.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"

SOURCE = Path(__file__).parents[1] / "src"


def check(function):
    """beartype, with int accepted for float; protocols are left to the static type checker."""
    hints = function.__annotations__
    hints.update({name: Any for name, hint in hints.items() if getattr(hint, "_is_protocol", False)})
    return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)


checker = ModuleType("heedful_annotation_checker")  # the hook takes a checker by its dotted name
checker.check = check  # type: ignore[attr-defined]
sys.modules[checker.__name__] = checker


def _module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def _can_be_hooked(path: Path) -> bool:
    """True if the annotations of a module can be checked. Exceptions:

    - packages, because their name would include everything in them;
    - Triton programs, which are compiled from their source;
    - `core`, `validation` and `dispatch`: torch.compile traces them at every call and would trace the hook too; they
      annotate abstract methods, or inputs that they reject with their own messages;
    - the command line, whose annotations typer reads.
    """
    if (
        path.stem in ("__init__", "__main__", "core", "validation", "dispatch")
        or "cli" in path.relative_to(SOURCE).parts
    ):
        return False
    return "import triton" not in path.read_text()


jaxtyping.install_import_hook(
    [_module(path) for path in sorted((SOURCE / "heedful").rglob("*.py")) if _can_be_hooked(path)],
    f"{checker.__name__}.check",
)
jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture
def annotations_enforced():
    """Raise an error for a call that does not fit a function's annotations."""
    jaxtyping.config.update("jaxtyping_disable", False)
    yield
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Use one thread: tensors in tests are small, and several test workers run in parallel."""
    import torch

    torch.set_num_threads(1)


MISSING = re.compile(r"(?!needs smollm2).*(not installed|no Chromium|can't be reached|make test installs it)", re.S)
"""Skip reasons that name a missing part of the environment; `make test` does not install SmolLM2."""


def _not_run(reporter) -> Counter[str]:
    reasons = (str(report.longrepr[2]).removeprefix("Skipped: ") for report in reporter.stats.get("skipped", ()))
    return Counter(reason for reason in reasons if MISSING.match(reason))


def pytest_terminal_summary(terminalreporter):
    """List at the end what was not run. CI has everything installed, so there it is a failure."""
    missing = _not_run(terminalreporter)
    if not missing:
        return
    terminalreporter.section("not run here", red=bool(os.environ.get("CI")), yellow=True)
    for reason, count in sorted(missing.items()):
        terminalreporter.line(f"{count} skipped: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    is_worker = hasattr(session.config, "workerinput")
    if os.environ.get("CI") and not is_worker and exitstatus == 0 and _not_run(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
