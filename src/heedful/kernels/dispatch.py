"""Which backend runs a kernel, and why.

A backend is a function and its objections: a list of sentences saying why it can't take these inputs. The
first backend without objections runs. Nothing else decides, so `explain` can always tell.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from heedful.shapes import Tensor

# For the whole process, like torch's own backend switches: torch.compile can follow a global, not a context variable.
_forced: str | None = None


@dataclass(frozen=True)
class Backend:
    """One implementation of a kernel; both functions take the kernel's arguments."""

    name: str
    run: Callable[..., Any]
    objections: Callable[..., list[str]]
    again: Callable[..., Any] | None = None
    """What it gives for inputs of a kind that it has taken before, None for any other; not all backends remember."""


def out_of_reach(q: Tensor) -> list[str]:
    """Why no Triton kernel could run for inputs where q is, whatever they are."""
    if q.device.type != "cuda":
        return [f"Triton kernels run on a GPU, the inputs are on {q.device}."]
    if find_spec("triton") is None:
        return ["Triton is not installed: pip install 'heedful[kernels]'."]
    return []


def triton_backend(module: str, name: str) -> Backend:
    """The function `name` of a module of Triton programs, which is imported when inputs on a GPU first ask for it."""

    def run(*args, **kwargs):
        return getattr(import_module(module), name)(*args, **kwargs)

    def objections(q: Tensor, *args, **kwargs) -> list[str]:
        return out_of_reach(q) or import_module(module).objections(q, *args, **kwargs)

    def again(*args):
        programs = sys.modules.get(module)
        return None if programs is None else programs.again(*args)

    return Backend("triton", run, objections, again)


class Kernel:
    """Implementations of one signature, in order of preference."""

    def __init__(self, name: str, *backends: Backend):
        self.name = name
        self.backends = {backend.name: backend for backend in backends}

    def __call__(self, q: Tensor, *args, **kwargs):
        """Run on the first backend without objections, in the precision of the inputs: autocast stays outside."""
        if torch.is_autocast_enabled(q.device.type):
            with as_given(q):
                return self.choose(q, *args, **kwargs).run(q, *args, **kwargs)
        return self.choose(q, *args, **kwargs).run(q, *args, **kwargs)

    def again(self, *args):
        """What the Triton backend gives for inputs of a kind that it has taken before, which nobody asks about again.

        None for any other, and where another backend was asked for: the full call is for them.
        """
        backend = self.backends.get(_forced or "triton") or self.backends["triton"]
        return None if backend.again is None else backend.again(*args)

    def choose(self, *args, **kwargs) -> Backend:
        """The backend that would run; an error with every objection where none can."""
        forced = _forced
        wanted = [self.backends[forced]] if forced in self.backends else self.backends.values()
        refusals = {}
        for backend in wanted:
            refusals[backend.name] = backend.objections(*args, **kwargs)
            if not refusals[backend.name]:
                return backend
        reasons = "\n".join(f"  {name}: {reason}" for name, why in refusals.items() for reason in why)
        hint = f' (asked for by heedful.backend("{forced}"))' if forced in self.backends else ""
        raise RuntimeError(f"{self.name}: no backend can take these inputs{hint}:\n{reasons}")

    def refuses(self, name: str, *args, **kwargs) -> list[str]:
        """Why one backend would not run: its objections, or that another one was asked for."""
        if _forced in self.backends and _forced != name:
            return [f'heedful.backend("{_forced}") was asked for.']
        return self.backends[name].objections(*args, **kwargs)

    def explain(self, *args, **kwargs) -> str:
        """One line a backend: whether it would take these inputs and, if not, why not."""
        lines = []
        for backend in self.backends.values():
            why = backend.objections(*args, **kwargs)
            lines.append(f"{self.name}/{backend.name}: {'; '.join(why) if why else 'can run'}")
        return "\n".join([*lines, f"→ {self.choose(*args, **kwargs).name}"])


def as_given(x: Tensor):
    """No autocast on the device of x: what a kernel raised to float32 must not be rounded again on the way."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def on_device(x: Tensor):
    """Triton launches on the current device: make it that of x where it is not."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def asked_for() -> str | None:
    """The backend that `heedful.backend` asks for, if any."""
    return _forced


@contextmanager
def _force(name: str | None) -> Iterator[None]:
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


class _Chooser:
    """`with heedful.backend("torch"): …` runs every kernel that has that backend on it."""

    known = ("torch", "sdpa", "triton")

    def __call__(self, name: str | None):
        if name is not None and name not in self.known:
            raise ValueError(f"backend: expected one of {', '.join(self.known)} or None, got {name!r}.")
        return _force(name)

    def explain(self, mechanism, q, k, v, *, segments=None) -> str:
        """Which backend `mechanism(q, k, v)` would run on, and what the others object to."""
        return mechanism.explain(q, k, v, segments=segments)


backend = _Chooser()
