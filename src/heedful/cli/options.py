"""Parse the values of `--option`: a small subset of Python literals and patterns; nothing is evaluated."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

from heedful.mechanisms import Entry
from heedful.patterns import And, Or, Pattern

SIZES = ("d", "heads", "length")
"""Arguments of builders that describe the inputs: these have their own flags."""


def read_options(entry: Entry, settings: list[str]) -> dict[str, Any]:
    """Parse NAME=VALUE pairs; the type of an option's default decides how its value is read.

    >>> from heedful import CATALOG
    >>> read_options(CATALOG["longformer"], ["window=64", "tokens=0,7"])
    {'window': 64, 'tokens': (0, 7)}
    """
    parameters = {
        name: parameter for name, parameter in inspect.signature(entry.build).parameters.items() if name not in SIZES
    }
    options = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--option {setting}: expected NAME=VALUE, as in --option before=64.")
        if name in SIZES:
            raise ValueError(f"--option {name}: sizes have flags of their own, --n, --d and --heads.")
        if name not in parameters:
            raise ValueError(f"{entry.name} has no option {name!r}; it takes {', '.join(parameters) or 'none'}.")
        options[name] = _value(setting, value, parameters[name])
    return options


def _value(setting: str, value: str, parameter: inspect.Parameter) -> Any:
    default = parameter.default
    if isinstance(default, Pattern):
        return read_pattern(value)
    if isinstance(default, (bool, int, float, str, tuple)):
        kind = type(default).__name__
    else:  # no default, or None: use the annotation
        kinds = re.findall(r"\b(?:bool|int|float|str|tuple)\b", str(parameter.annotation))
        if not kinds:
            raise ValueError(f"--option {setting}: {parameter.name} can be set from Python only.")
        if value.lower() == "none":
            return None
        kind = kinds[0]
    read, wanted = READERS[kind]
    try:
        return read(value)
    except ValueError:
        raise ValueError(f"--option {setting}: expected {wanted}.") from None


def _truth(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError
    return value.lower() == "true"


def _integer(value: str) -> int:
    if abs(int(value)) >= 2**31:  # longer than any sequence, and close to overflow in tensors of positions
        raise ValueError
    return int(value)


def _integers(value: str) -> tuple[int, ...]:
    return tuple(_integer(part) for part in value.strip("()").split(",") if part.strip())


READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "bool": (_truth, "true or false"),
    "int": (_integer, "a whole number below 2³¹"),
    "float": (float, "a number"),
    "str": (str, "a word"),
    "tuple": (_integers, "whole numbers, with commas between them"),
}


def read_pattern(text: str) -> Pattern:
    """Parse a pattern in Python syntax, also in lower case; nothing is evaluated.

    >>> read_pattern("window(8, sinks=1) & Causal")
    (Window(before=8, after=0, sinks=1) & Causal())
    """
    kinds = {kind.__name__.lower(): kind for kind in Pattern.__subclasses__() if kind not in (And, Or)}

    def read(node: ast.AST) -> Pattern | None:
        match node:
            case ast.BinOp(left, ast.BitAnd() | ast.BitOr() as join, right):
                first, second = read(left), read(right)
                if first is None or second is None:
                    return None
                return first & second if isinstance(join, ast.BitAnd) else first | second
            case ast.Name(name) if name.lower() in kinds:
                return _made(kinds[name.lower()], [], [])
            case ast.Call(ast.Name(name), values, named) if name.lower() in kinds:
                return _made(kinds[name.lower()], values, named)
        return None

    try:
        pattern = read(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        pattern = None
    if pattern is None:
        names = ", ".join(kind.__name__ for kind in kinds.values())
        raise ValueError(f"{text!r} is no pattern; patterns are {names}, joined with & and |.")
    return pattern


def _made(kind: type[Pattern], values: list[ast.expr], named: list[ast.keyword]) -> Pattern:
    arguments = ", ".join(inspect.signature(kind).parameters)
    try:
        return kind(*map(_numbers, values), **{str(keyword.arg): _numbers(keyword.value) for keyword in named})
    except TypeError:
        raise ValueError(f"pattern: expected {kind.__name__}({arguments}), with numbers.") from None


def _numbers(node: ast.expr) -> Any:
    """A number, or a tuple or list of numbers."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        raise TypeError from None
    for number in value if isinstance(value, (tuple, list)) else [value]:
        if not isinstance(number, int) or abs(number) >= 2**31:
            raise TypeError
    return value
