"""What a task of somebody's own must have, in one line that names what it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mpt.errors import PartError
from mpt.seams.members import article
from mpt.seams.task import Task

TASK_MEMBERS = {
    "metric": 'metric = "accuracy"',
    "higher_is_better": "higher_is_better = True",
    "modules": 'self.modules = {"net": net}',
    "trainable": 'self.trainable = {"net": net}',
}
"""Member without a default -> an example of it."""


def are_networks(made: Any) -> bool:
    """Whether a value is a dict of networks by name."""
    return isinstance(made, Mapping) and all(isinstance(one, nn.Module) for one in made.values())


def check_task(task: Task) -> Task:
    """Return a task that has what each step asks for. Raises PartError for one that lacks something."""
    what = f"task {type(task).__name__}"
    for name, example in TASK_MEMBERS.items():
        if not hasattr(task, name):
            raise PartError(f"{what}: it has no {name}; give the class one, as in {example}")
    for name in ("modules", "trainable"):
        made = getattr(task, name)
        if not are_networks(made):
            raise PartError(
                f"{what}: its {name} is {article(made)}; expected a dict of networks by name, as in "
                f"{TASK_MEMBERS[name]}"
            )
    require_hook(task, "phases", "the updates of a step")
    return task


def require_hook(task: Task, name: str, result: str) -> None:
    """Raise PartError for a task without a hook of its own that its class must have, with what it returns."""
    if getattr(type(task), name) is getattr(Task, name):
        kind = type(task).__name__
        raise PartError(
            f"task {kind}: it has no {name}, which returns {result}; give the class one"
        )
