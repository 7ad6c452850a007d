"""An exception in code that is no part of mpt, its dependencies or Python: said with the frames of that code alone.

Whoever writes a model, a data set or a task of their own wants to know which of their lines failed and how, not through
which forty lines of torch and mpt it was called. `mpt --debug` shows all.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from mpt.config.finding.moved import explain_attribute
from mpt.config.finding.part_packages import KINDS, outside_packages
from mpt.outside.own_calls import explain_call

MPT = Path(__file__).resolve().parents[1]
MOST_FRAMES = 12
HALF = re.compile(r"\b(c10::)?(Half|BFloat16)\b")
"""Half dtypes in torch's messages."""


def explain(error: BaseException) -> str | None:
    """Describe a failure in the user's own code or a model library; None for a fault of mpt."""
    said = explain_own_code(error) or explain_call(error)
    said = said or explain_library_model(error) or explain_plain_modules(error)
    is_of_half = said is not None and HALF.search(str(error)) is not None
    return (
        f"{said}\n(half may be the cause: `mpt doctor CONFIG` tries float32 and a cure)"
        if is_of_half
        else said
    )


def explain_own_code(error: BaseException) -> str | None:
    """Describe a failure in the user's own code with its place, or None if no such code was running."""
    own = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_own(frame)]
    if not own:
        return None
    frame, line = own[-1]
    where = f"{Path(frame.f_code.co_filename).name}:{line}"
    said, what = first_line(error), lines_of(error)
    shown = [
        f"{said_of(own[0][0])} raised in {frame.f_code.co_name} ({where}): {said}",
        *(f"  {t}" for t in what[1:]),
    ]
    for one, number in own[-MOST_FRAMES:]:
        entry = traceback.FrameSummary(one.f_code.co_filename, number, one.f_code.co_name)
        shown.append(f"  {entry.filename}:{number} in {entry.name}: {entry.line}")
    return "\n".join([*shown, "(these are the lines of your own; mpt --debug COMMAND shows all)"])


def explain_library_model(error: BaseException) -> str | None:
    """Return which module of an installed model library raised, or None if none of them was running.

    An input of the wrong size or an option that does not suit ends in a library's own assertion: that line says more
    than the way through torch and mpt to it.
    """
    modules = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_of_model_library(frame)
    ]
    if not modules:
        return None
    frame, line = modules[-1]
    library = library_of(frame)
    path = "/".join(Path(frame.f_code.co_filename).parts[-3:])
    module = type(frame.f_locals["self"]).__name__
    shown = f"{module} of {library} raised in {frame.f_code.co_name} ({path}:{line}): {first_line(error)}"
    more = (f"  {text}" for text in lines_of(error)[1:])
    return "\n".join([shown, *more, "(the model's own refusal; mpt --debug COMMAND shows all)"])


def explain_plain_modules(error: BaseException) -> str | None:
    """Return which of torch's own modules raised in a model that a part from outside put together, or None.

    A model that is a `Sequential` of torch's modules has no line of its own in the traceback of its forward.
    """
    selves: list[Any] = [
        frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    owners = [owner for owner in selves if is_module(owner)]
    if not owners or not any(True for _ in outside_packages()):
        return None
    if any(type(owner).__module__.partition(".")[0] != "torch" for owner in owners):
        return None
    outermost, innermost = owners[0], owners[-1]
    path = next((name for name, one in outermost.named_modules() if one is innermost and name), "")
    where = (
        f"{innermost}, module {path} of the {type(outermost).__name__}"
        if path
        else str(innermost).split("(\n")[0]
    )
    more = (f"  {text}" for text in lines_of(error)[1:])
    shown = f"your model raised in forward, in {where}: {first_line(error)}"
    return "\n".join(
        [shown, *more, "(no line of your own was running; mpt --debug COMMAND shows all)"]
    )


def first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its text, and the replacement of an earlier member."""
    said = ": ".join([type(error).__name__, *lines_of(error)[:1]])
    moved = explain_attribute(error)
    return f"{said} ({moved})" if moved else said


def lines_of(error: BaseException) -> list[str]:
    """Return the lines of an exception's message that are not empty."""
    return [text for text in str(error).splitlines() if text.strip()]


def is_own(frame: FrameType) -> bool:
    """Return whether a frame is of the user's code: of a part package from outside, or of no installed package."""
    return frame.f_globals.get("__name__") != "__main__" and is_own_file(frame.f_code.co_filename)


def is_own_file(name: str) -> bool:
    """Return whether a source file is the user's: of a part package from outside, or of no installed package."""
    if name.startswith("<"):
        return False
    path = real_path(name)
    if any(is_below(path, os.path.realpath(package.folder)) for package in outside_packages()):
        return True
    is_installed = any(is_below(path, home) for home in installed_homes())
    return not is_installed and not re.search(r"(site|dist)-packages", name)


def real_path(name: str) -> str:
    """Return a file's path without links. Folders are looked up once: all imported modules may be asked for."""
    folder, base = os.path.split(os.path.abspath(name))
    path = os.path.join(real_folder(folder), base)
    return os.path.realpath(path) if os.path.islink(path) else path


@cache
def real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def is_below(path: str, folder: str) -> bool:
    return path.startswith(os.path.join(folder, ""))


@cache
def installed_homes() -> list[str]:
    """Return the folders of mpt, of Python's own library and of installed packages."""
    paths = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    homes = [str(MPT), *paths, os.path.join(sys.base_prefix, "lib")]
    return [os.path.realpath(home) for home in homes]


def is_in(path: str, *packages: str) -> bool:
    """Return whether a source file lies in one of some packages, wherever they are installed: `torch`, `mpt.nn`.

    Names of folders do not tell: an environment may lie in a folder called torch.
    """
    return path.startswith(tuple(folder_of(package) for package in packages))


@cache
def folder_of(package: str) -> str:
    """Return a package's folder with a separator behind it; "\\0", which begins no path, if it is not installed."""
    name, *inner = package.split(".")
    found = find_spec(name)
    places = found.submodule_search_locations if found else None
    return os.path.join(next(iter(places)), *inner, "") if places else "\0"


def is_of_model_library(frame: FrameType) -> bool:
    """Return whether a frame is a method of a module of neither mpt nor torch: timm's, torchvision's, another's."""
    if not is_module(frame.f_locals.get("self")):
        return False
    return library_of(frame) not in ("mpt", "torch", "torchao")


def is_module(owner: object) -> bool:
    """Return whether an object is an nn.Module, without importing torch."""
    return any(
        base.__name__ == "Module" and base.__module__.startswith("torch.")
        for base in type(owner).__mro__
    )


def library_of(frame: FrameType) -> str:
    """Return the top-level package that a frame's code is in."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def said_of(frame: FrameType) -> str:
    """Describe a frame's code: `your model MyNet`."""
    path = Path(frame.f_code.co_filename).resolve()
    kind = "code"
    for package in outside_packages():
        if path.is_relative_to(package.folder.resolve()):
            kind = KINDS.get(path.relative_to(package.folder.resolve()).parts[0], "code")
    owner = frame.f_locals.get("self")
    if kind == "code" and is_module(owner):
        kind = "model"
    return f"your {kind} {path.stem if owner is None else type(owner).__name__}"
