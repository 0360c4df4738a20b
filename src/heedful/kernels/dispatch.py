"""Choose the backend of a kernel call: the only place where that happens.

A kernel is an ordered list of backends. A backend lists in sentences why it can't take given inputs: its objections.
The first backend without objections runs, unless it yields to a faster one that has none either.

The decision is cached by kind of input. A kernel's `kind` maps its arguments to a key that holds everything the
objections depend on (shapes, dtypes, device, gradients, options). It returns None if they depend on the values of a
tensor, as with segments; then every call decides anew. `explain` shows the decision.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from heedful.shapes import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
MOST_DECISIONS = 1024
"""How many decisions a kernel caches; a full cache is cleared."""


@dataclass(frozen=True)
class Backend:
    """One implementation of a kernel; all functions take the kernel's arguments.

    name         a short name; `heedful.backend(name)` selects it
    run          the implementation
    objections   why it can't take these inputs, in sentences; an empty list if it can
    yields       {name of another backend: why that one is faster} for these inputs
    relaunch     a cached launch for further inputs of this kind, or None; called once per new kind
    """

    name: str
    run: Callable[..., Any]
    objections: Callable[..., list[str]]
    yields: Callable[..., dict[str, str]] | None = None
    relaunch: Callable[..., Callable[..., Any] | None] | None = None


@dataclass(frozen=True)
class Decision:
    """The backend for inputs of one kind, why earlier backends were rejected, and the function to call."""

    backend: Backend
    objections: dict[str, list[str]]
    run: Callable[..., Any]
    launches: bool = False
    """True if `run` is a cached launch, which autocast does not affect."""


class Kernel:
    """Implementations of one signature, in order of preference.

    >>> slow = Backend("torch", lambda x: x + x, lambda x: [])
    >>> fast = Backend("triton", lambda x: 2 * x, lambda x: [] if x.is_cuda else ["x is not on a GPU."])
    >>> double = Kernel("double", fast, slow)
    >>> double(torch.ones(2))
    tensor([2., 2.])
    >>> print(double.explain(torch.ones(2)))
    double/triton: x is not on a GPU.
    double/torch: can run
    → torch
    """

    def __init__(self, name: str, *backends: Backend, kind: Callable[..., Hashable | None] | None = None):
        self.name, self.kind = name, kind
        self.backends = {backend.name: backend for backend in backends}
        self.decisions: dict[Hashable, Decision] = {}
        for backend in self.backends:
            _names[self._label(backend)] = _names[_last(backend)] = None

    @property
    def names(self) -> list[str]:
        """The names of the backends without the kernel's name, each once."""
        return list(dict.fromkeys(map(_last, self.backends)))

    def __call__(self, first, /, *args, **kwargs):
        """Run the chosen backend with autocast off, in the precision of the inputs.

        first   a tensor, or another object with a device
        """
        decision = self.decide(first, *args, **kwargs)
        if decision.launches or not torch.is_autocast_enabled(first.device.type):
            return decision.run(first, *args, **kwargs)
        with as_given(first):
            return decision.run(first, *args, **kwargs)

    def choose(self, *args, **kwargs) -> Backend:
        """The backend for these inputs; raises an error that lists every objection if there is none."""
        return self.decide(*args, **kwargs).backend

    def decide(self, *args, **kwargs) -> Decision:
        """The decision for these inputs; cached by kind of input."""
        if self.kind is None or torch.compiler.is_compiling():
            return self._decide(args, kwargs)
        kind = self.kind(*args, **kwargs)
        if kind is None:
            return self._decide(args, kwargs)
        key = kind, _forced, torch.is_grad_enabled()
        try:
            found = self.decisions.get(key)
        except TypeError:  # a pattern without a hash
            return self._decide(args, kwargs)
        if found is None:
            found = self._decide(args, kwargs)
            if len(self.decisions) >= MOST_DECISIONS:
                self.decisions.clear()
            relaunch = found.backend.relaunch
            launch = None if relaunch is None else relaunch(*args, **kwargs)
            self.decisions[key] = found if launch is None else replace(found, run=launch, launches=True)
        return found

    def _decide(self, args: tuple, kwargs: dict[str, Any]) -> Decision:
        with as_given(args[0]):
            return self._first_without_objections(args, kwargs)

    def _first_without_objections(self, args: tuple, kwargs: dict[str, Any]) -> Decision:
        forced = self._asked_for()
        wanted = forced or self.backends
        objections: dict[str, list[str]] = {}

        def object_to(name: str) -> list[str]:
            if name not in objections:
                objections[name] = wanted[name].objections(*args, **kwargs)
            return objections[name]

        for name, backend in wanted.items():
            if object_to(name):
                continue
            faster = {} if backend.yields is None else backend.yields(*args, **kwargs)
            why = [reason for other, reason in faster.items() if other in wanted and not object_to(other)]
            if not why:
                return Decision(backend, objections, backend.run)
            objections[name] = why
        reasons = "\n".join(f"  {name}: {reason}" for name, why in objections.items() for reason in why)
        hint = "" if not forced else f' (asked for by heedful.backend("{_forced}"))'
        raise RuntimeError(f"{self.name}: no backend can take these inputs{hint}:\n{reasons}")

    def refuses(self, name: str, *args, **kwargs) -> list[str]:
        """Why this backend would not run: its objections, or that `heedful.backend` selects another."""
        return self._not_asked_for(name) or self.backends[name].objections(*args, **kwargs)

    def explain(self, first, /, *args, **kwargs) -> str:
        """One line per backend with its objections, then the backend that runs."""
        lines = []
        with as_given(first):
            decision = self.decide(first, *args, **kwargs)
            for name, backend in self.backends.items():
                why = self._not_asked_for(name) or decision.objections.get(name)
                why = backend.objections(first, *args, **kwargs) if why is None else why
                lines.append(f"{self._label(name)}: {'; '.join(why) if why else 'can run'}")
        return "\n".join([*lines, f"→ {decision.backend.name}"])

    def _asked_for(self) -> dict[str, Backend]:
        """The backends of this kernel that `heedful.backend` selects."""
        if _forced is None:
            return {}
        return {name: x for name, x in self.backends.items() if _forced in (_last(name), self._label(name))}

    def _not_asked_for(self, name: str) -> list[str] | None:
        asked = self._asked_for()
        return [f'heedful.backend("{_forced}") was asked for'] if asked and name not in asked else None

    def _label(self, backend: str) -> str:
        """ "kernel/backend"; unchanged if the name already includes a kernel."""
        return backend if "/" in backend else f"{self.name}/{backend}"


def _last(backend: str) -> str:
    """The part after the slash of "kernel/backend"."""
    return backend.rpartition("/")[2]


def triton_unavailable(q) -> list[str]:
    """Why no Triton kernel can run on the device of q; empty if one can."""
    if q.device.type != "cuda":
        return [f"Triton kernels run on a GPU, the inputs are on {q.device}."]
    if find_spec("triton") is None:
        return ["Triton is not installed: pip install 'heedful[kernels]'."]
    return []


def triton_backend(module: str, name: str, *, relaunches: bool = False) -> Backend:
    """A backend for the function `name` of a module of Triton kernels, imported on the first use with GPU inputs.

    relaunches   whether the module has a function `relaunch`, for `Backend.relaunch`
    """

    def run(*args, **kwargs):
        return getattr(import_module(module), name)(*args, **kwargs)

    def objections(q, *args, **kwargs) -> list[str]:
        return triton_unavailable(q) or import_module(module).objections(q, *args, **kwargs)

    def relaunch(*args, **kwargs):
        return import_module(module).relaunch(*args, **kwargs)

    return Backend("triton", run, objections, relaunch=relaunch if relaunches else None)


def as_given(x):
    """Disable autocast on the device of x: it would round again what a kernel converted to float32."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def on_device(x: Tensor):
    """Make the device of x the current device, on which Triton launches."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def uncompiled(function: Function) -> Function:
    """Exclude a function from torch.compile, including what it calls: tracing would unroll loops over the length.

    >>> uncompiled(lambda x: x + 1)(1)
    2

    `torch.compiler.disable` does the same but imports the compiler: 140 MiB, and half of heedful's import time.
    """

    call: Callable[..., Any] = function
    if hasattr(function, "__wrapped__"):  # its code is that of a decorator, which other functions share

        @wraps(function)
        def call(*args, **kwargs):
            return function(*args, **kwargs)

    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(call.__code__, skip)
    except (AttributeError, TypeError):  # another version of torch
        return torch.compiler.disable(function)
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


# For the whole process, like torch's own backend switches: torch.compile can trace a global, not a context variable.
_forced: str | None = None
_names: dict[str, None] = {}
"""The backends of all kernels: each as "name" and as "kernel/name"."""
RENAMED = {"groups": "cpu_groups"}
"""Former names; they still work, with a warning."""


def asked_for() -> str | None:
    """The backend that `heedful.backend` selects, or None."""
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
    """`with heedful.backend("torch"): …` selects that backend for every kernel that has it.

    "softmax/torch" selects it for one kernel. `heedful list` and `explain` show the names.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all backends."""
        return tuple(name for name in _names if "/" not in name)

    def __call__(self, name: str | None):
        if name in RENAMED:
            warnings.warn(f"backend: {name!r} is now {RENAMED[name]!r}.", DeprecationWarning, stacklevel=2)
            name = RENAMED[name]
        if name is not None and name not in _names:
            known = ", ".join(sorted(self.names))
            raise ValueError(
                f'backend: got {name!r}, expected one of {known}, one of them in one kernel, as in "softmax/torch", or '
                "None. mechanism.explain(q, k, v) shows the backends of a mechanism."
            )
        return _force(name)

    def explain(self, mechanism, q, k, v, *, segments=None) -> str:
        """Which backend `mechanism(q, k, v)` runs on, and the objections of the others."""
        return mechanism.explain(q, k, v, segments=segments)


backend = _Chooser()
