"""Places of a name that mpt does not know: torchvision's and timm's models, part packages not yet named.

And the task that a model's file does not name. Only looked at when a configuration is refused. Packages are read as
text, not imported: torch would be imported with them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from mpt.config.finding.part_packages import VARIABLE, outside_packages
from mpt.config.finding.registry import Plugin, Registry
from mpt.config.text.messages import nearest, unknown_name
from mpt.config.text.yaml_text import WEIGHTS, printable
from mpt.foreign.files import LARGEST_SOURCE_BYTES, read_text

SOURCES = ("torchvision", "timm")
REGISTERED = re.compile(r"^@register_model\b[^\n]*\n(?:@[^\n]*\n)*def (\w+)\(", re.MULTILINE)


FEW = 12
"""As many names are listed in full."""
NEAR = 5
"""As many names that are like the wrong one are listed."""


def unknown_model(name: str, known: Sequence[str]) -> str:
    """Return the words for a model that does not exist: the likely meaning, the nearest names, and the command that
    lists all."""
    if name.endswith(WEIGHTS):
        return (
            f"found '{printable(name)}', a file of weights: name its model with model.name (`mpt list models`) and "
            f"the file with model.weights={printable(name)}; nothing is downloaded"
        )
    elsewhere = models_elsewhere(name)
    guess = elsewhere or nearest(name, known)
    own = "" if guess else parts_hint("nn", name)
    if len(known) <= FEW:
        return unknown_name(name, known, meant=elsewhere) + own
    near = [one for one in near_models(name, known) if one not in (guess or "").split(" or ")][
        :NEAR
    ]
    if guess:
        said = f"did you mean {guess}?" + (f" Also near: {', '.join(near)}" if near else "")
    elif near:
        said = f"the nearest are {', '.join(near)}"
    else:
        said = (
            f"allowed: one of {', '.join(one for one in known if ':' not in one)}, or a library's"
        )
    return f"found '{printable(name)}'; {said}; `mpt list models` lists all{own}"


def near_models(name: str, known: Sequence[str]) -> list[str]:
    """Return the full names of the models whose names are most like this one; none if it is long.

    Those that begin with it come first, the shortest before the others: `vit_base` is short for `vit_base_patch16_224`.
    """
    if len(name) > 60:
        return []
    elsewhere = [
        f"{package}:{model}" for package in SOURCES for model in sorted(model_names(package))
    ]
    full: dict[str, list[str]] = {}
    for one in dict.fromkeys([*known, *elsewhere]):
        full.setdefault(one.rpartition(":")[2], []).append(one)
    folded = name.casefold().replace("-", "_")
    begins = sorted(
        (one for one in full if one.startswith(folded)), key=lambda one: (len(one), one)
    )[:NEAR]
    matches = begins if len(folded) > 3 and begins else get_close_matches(folded, full, n=NEAR)
    return [one for match in matches for one in full[match]]


def models_elsewhere(name: str) -> str | None:
    """Return the full names of torchvision's and timm's models of this name, or None."""
    found = [f"{package}:{name}" for package in SOURCES if name in model_names(package)]
    return " or ".join(found) or None


def model_names(package: str) -> set[str]:
    """Return the names of the models that an installed package registers; none if it is not installed."""
    if not re.fullmatch(r"\w+", package) or (spec := find_spec(package)) is None:
        return set()
    folders = [Path(folder) / "models" for folder in spec.submodule_search_locations or []]
    names: set[str] = set()
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        try:
            names.update(REGISTERED.findall(read_text(path, LARGEST_SOURCE_BYTES, "replace")))
        except OSError:
            continue
    return names


def parts_hint(subpackage: str, name: str) -> str:
    """Return a hint at a folder of parts near by that has a file of this name, or the words for the places of parts.

    A folder of parts is found in the working directory and one level below it.
    """
    if not re.fullmatch(r"\w+", name):
        return ""
    known = (
        path
        for package in outside_packages()
        for path in package.paths(subpackage)
        if path.stem == name
    )
    for path in known:
        return (
            f"; {path} is there, but has no `class Settings(Options)`, by which it would be a part"
        )
    for path in (Path(subpackage, f"{name}.py"), *sorted(Path().glob(f"*/{subpackage}/{name}.py"))):
        if path.is_file() and "class Settings" not in read_text(
            path, LARGEST_SOURCE_BYTES, "replace"
        ):
            return f"; {path} is there, but has no `class Settings(Options)`, by which it would be a part"
        if path.is_file():
            return f"; {path} is there: add --parts {path.parent.parent}"
    return f". A part of your own is found with --parts DIR (a folder with {subpackage}/{name}.py) or {VARIABLE}"


def models_of(task: Plugin, registry: Registry) -> list[str]:
    """Return the names of the models whose own task this is."""
    plugins = (registry.find("nn", name) for name in registry.names("nn"))
    return [plugin.name for plugin in plugins if plugin and plugin.task == task.name]


def undeclared_task(model: Plugin, registry: Registry) -> str | None:
    """Return the error of a model whose file names no task, or an unknown one; None if it names a known one."""
    if model.task is not None and registry.find("tasks", model.task):
        return None
    tasks = registry.names("tasks")
    if model.task is not None:
        said = unknown_name(model.task, tasks)
        hint = "" if "did you mean" in said else parts_hint("tasks", model.task)
        return f"{model.path}: TASK, the task that trains it: {said}{hint}"
    return (
        f'{model.path} does not name the task that trains it; write a line as TASK = "classify" there, with one of '
        f"{', '.join(tasks)}"
    )
