"""A training step outside of mpt, planned from another process: `mpt plan MODULE:FUNCTION` and `mpt.plan_step`.

Torch is not imported here, nor the script: both happen in a process of its own (`mpt.planner.client.session`).
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mpt.config.checking.layers import read_override
from mpt.errors import ConfigError
from mpt.planner.answers.own_plan import OwnPlan, Way
from mpt.planner.answers.plan import Plan
from mpt.planner.client.processes import PLANNING
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration, load_calibration
from mpt.planner.facts.capacity import Capacity, find_capacity
from mpt.planner.facts.gpus import Gpu
from mpt.planner.recipes.planned import choose_gpu
from mpt.run.process.files import refuse_unwritable

FACTORY = re.compile(r"(?:.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""A word that names a function and not a configuration."""
SCRIPT = re.compile(r".+\.(?:py|ipynb)")
"""A word that names a whole script, or a notebook."""


@dataclass(frozen=True)
class OwnPlanned:
    """The plan of somebody's own step on a GPU that need not be here."""

    gpu: Gpu
    calibration: Calibration
    capacity: Capacity
    found: OwnPlan

    @property
    def plan(self) -> Plan:
        """The step unchanged."""
        return self.found.plan

    @property
    def ways(self) -> list[Way]:
        """Changes to the script, best first."""
        return self.found.ways


def plan_own_step(
    factory: str | Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    words: Sequence[str] = (),
    allow: Sequence[str] = (),
    vram: str | None = None,
    gpu: str | None = None,
    desktop: str | None = None,
    largest: bool = False,
    snapshot: Path | None = None,
    calibration: Calibration | None = None,
    with_changes: bool = True,
) -> OwnPlanned:
    """Plan the step that a factory builds (`mpt.planner.own.execution.factory`), called with `arguments`.

    `factory` is a function, or its name: `path/to/file.py:function`, or `package.module:function` of a package that
    `allow` names. A script, `path/to/file.py`, is executed as it stands with `words` for its command line
    (`mpt.planner.own.execution.script`). The card's own calibration is used unless another is given. Raises ConfigError
    for a factory that cannot be found or called, and PlanError with module and line for a step that cannot be traced.
    """
    source = find_source(factory, allow, words)
    check_arguments(arguments)
    if snapshot is not None:
        refuse_unwritable(snapshot)
    card = choose_gpu(gpu)
    calibration = calibration or load_calibration(card.name)
    capacity = find_capacity(card, gpu is not None, vram, desktop)
    if largest and capacity.budget_bytes is None:
        raise ConfigError("--largest: a batch is the largest within a budget; add --gpu or --vram")
    with Session(card, calibration) as session:
        found = session.plan_own(
            source,
            dict(arguments),
            with_changes=with_changes,
            budget_bytes=capacity.budget_bytes,
            largest_batch=largest,
            snapshot=str(snapshot.absolute()) if snapshot else "",
        ).get()
    return OwnPlanned(card, calibration, capacity, found)


def read_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return `key=value` words as a factory's arguments. Raises ConfigError."""
    found: dict[str, Any] = {}
    for word in words:
        node, problems = read_override(word)
        if problems:
            raise ConfigError(f"{word}: {problems[0].text}")
        found |= cast("dict[str, Any]", node.plain())
    return found


def is_own(subject: str) -> bool:
    """Return whether a word names a script or a function, and not a configuration."""
    return any(one.fullmatch(subject) for one in (FACTORY, SCRIPT))


def arguments_of(factory: str, words: Sequence[str]) -> dict[str, Any]:
    """Return what of a command's further words are arguments of `plan_own_step`. Raises ConfigError."""
    if SCRIPT.fullmatch(factory):
        return {"arguments": {}, "words": words}
    return {"arguments": read_arguments(words)}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that cannot be sent to another process."""
    try:
        json.dumps(dict(arguments))
    except TypeError as error:
        raise ConfigError(
            f"arguments of a factory are numbers, texts, lists and mappings: {error}"
        ) from None


def find_source(
    factory: str | Callable[..., Any], allow: Sequence[str], words: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the fields of `mpt.planner.own.execution.source.Source`. Raises ConfigError."""
    if not isinstance(factory, str):
        return source_of_function(factory)
    if SCRIPT.fullmatch(factory):
        return {"where": str(path_of(factory)), "words": [*words]}
    where, _, function = factory.rpartition(":")
    if where.endswith(".ipynb"):
        raise ConfigError(
            f"{factory}: a notebook is planned as a whole, as {where}; put the function into a file of its own"
        )
    if not where or not function.isidentifier():
        raise ConfigError(
            f"found '{factory}'; write path/to/file.py:function or package.module:function"
        )
    if where.endswith(".py"):
        path = path_of(where)
        return {"where": str(path), "function": function, "folder": str(path.parent)}
    package = where.partition(".")[0]
    if not any(where == granted or where.startswith(f"{granted}.") for granted in allow):
        raise ConfigError(
            f"'{factory}' would run code of the package {package}, which is not granted; if you trust it, add "
            f"--allow {package} to the command"
        )
    return {"where": where, "function": function, "folder": os.getcwd()}


def path_of(file: str) -> Path:
    """Return the whole path of a file. Raises ConfigError."""
    path = Path(file).absolute()
    if not path.is_file():
        raise ConfigError(f"{file}: there is no such file")
    return path


def source_of_function(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's place. Raises ConfigError for one that no other process can import."""
    if os.environ.get(PLANNING):
        raise ConfigError(
            'call mpt.plan_step below `if __name__ == "__main__":`, since planning imports its file'
        )
    name = getattr(factory, "__name__", "")
    path = inspect.getsourcefile(factory) if inspect.isfunction(factory) else None
    if (
        path is None
        or not Path(path).is_file()
        or factory.__qualname__ != name
        or not name.isidentifier()
    ):
        raise ConfigError(
            "plan_step takes a function at the top level of a file, which another process can import; a notebook is "
            "planned as a whole, by its name"
        )
    module = factory.__module__
    if module == "__main__":
        path = str(Path(path).absolute())
        return {"where": path, "function": name, "folder": str(Path(path).parent)}
    folder = Path(sys.modules[module].__file__ or path).absolute().parents[module.count(".")]
    return {"where": module, "function": name, "folder": str(folder)}
