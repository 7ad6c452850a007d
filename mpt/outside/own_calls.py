"""A call that a part of the user's own cannot take: `fetch(self, indices)` where mpt calls `fetch(indices, epoch)`.

Python raises in the caller, so that no line of the part is in the traceback. Which function was meant is found by the
name in the message among the functions and methods of parts, and by the number of arguments on the line that called.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

from mpt.config.finding.part_packages import KINDS, outside_packages

REFUSED = re.compile(r"^([\w.<>]+)\(\) (?:takes|missing|got an unexpected|got some|got multiple)")
COUNT = re.compile(r"\(\) takes (?:from \d+ to )?(\d+) positional")
NAMES = re.compile(r"'(\w+)'")
BUILDS = {
    "nn": "build(settings, data)",
    "tasks": "build(settings, model_settings, modules, data, precision)",
    "data": "build(settings, split, seed)",
    "precision": "build(name, settings, device)",
    "memory": "build(settings)",
    "optim": "build(settings, parameters)",
    "losses": "loss(logits, labels)",
    "commands": "run(command)",
}
"""A part package's folder -> the call of its files' function."""


def explain_call(error: BaseException) -> str | None:
    """Return which function of a part cannot take mpt's arguments, and which it must take; None for other errors."""
    refused = REFUSED.match(str(error)) if isinstance(error, TypeError) else None
    if refused is None or error.__traceback__ is None:
        return None
    found = [
        one
        for one in own_functions()
        if one[2].__qualname__ == refused[1] and is_meant(one[2], str(error))
    ]
    given = arguments_of_call(error.__traceback__)
    if given is not None:
        found = [one for one in found if not takes(one[2], *given)] or found
    if not found:
        return None
    folder, owner, function = found[0]
    named = f"your {KINDS[folder]} {function.__qualname__} ({place_of(function)})"
    wanted = wanted_by(folder, owner, function)
    return f"{named} does not take the arguments that it is called with: {error}" + (
        f"; expected {wanted}" if wanted else ""
    )


def place_of(function: Any) -> str:
    """Return the file and the line of a function's definition."""
    code = function.__code__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def is_meant(function: FunctionType, said: str) -> bool:
    """Return whether a refusal's count or names can be of a function: many parts have a `build`."""
    count = COUNT.search(said)
    code = function.__code__
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    missing = said.partition("missing ")[2]
    return (count is None or int(count[1]) == code.co_argcount) and all(
        name in parameters for name in NAMES.findall(missing)
    )


def own_functions() -> Iterator[tuple[str, type | None, FunctionType]]:
    """Yield the functions and methods of imported parts from outside: folder of the part, class or None, function."""
    packages = [package.module_name for package in outside_packages()]
    for name, module in list(sys.modules.items()):
        home = next((one for one in packages if name.startswith(f"{one}.")), None)
        folder = name[len(home) + 1 :].partition(".")[0] if home else ""
        if folder not in KINDS:
            continue
        for value in list(vars(module).values()):
            if getattr(value, "__module__", None) != name:
                continue
            if isinstance(value, FunctionType):
                yield folder, None, value
            elif isinstance(value, type):
                for member in vars(value).values():
                    inner = inspect.unwrap(member) if callable(member) else member
                    if isinstance(inner, FunctionType):
                        yield folder, value, inner


def arguments_of_call(trace: TracebackType) -> tuple[int, tuple[str, ...]] | None:
    """Return how many arguments without and which with names the innermost call had; None if its line does not say."""
    last = traceback.StackSummary.extract(traceback.walk_tb(trace), lookup_lines=True)[-1]
    if (
        last.colno is None
        or last.end_colno is None
        or not last.line
        or last.lineno != last.end_lineno
    ):
        return None
    indent = len(last._original_line) - len(last._original_line.lstrip())  # type: ignore[attr-defined]
    try:
        call = ast.parse(last.line[last.colno - indent : last.end_colno - indent], mode="eval").body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(call, ast.Call) or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    names = tuple(one.arg for one in call.keywords if one.arg is not None)
    return (len(call.args), names) if len(names) == len(call.keywords) else None


def takes(function: FunctionType, count: int, names: tuple[str, ...]) -> bool:
    """Return whether a function, or a method that is bound, takes arguments of that number and of these names."""
    is_method = "." in function.__qualname__
    try:
        inspect.signature(function).bind(*[None] * (count + is_method), **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def wanted_by(folder: str, owner: type | None, function: FunctionType) -> str | None:
    """Return the call that a part's function must take: of its kind, or of the method that it overrides."""
    name: Any = function.__name__
    if owner is None:
        known = BUILDS.get(folder, "")
        return known if known.startswith(f"{name}(") else None
    if folder == "data" and name == "fetch":
        return "fetch(self, indices, epoch)"
    for base in owner.__mro__[1:]:
        above = vars(base).get(name)
        if isinstance(above, FunctionType) and base.__module__.startswith("mpt."):
            return f"{name}({', '.join(inspect.signature(above).parameters)})"
    return None
