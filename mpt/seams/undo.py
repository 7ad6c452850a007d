"""The notes that a task takes on itself during an update, for undoing an update that fails."""

from __future__ import annotations

from typing import Any

from mpt.seams.task import Task


def notes_of(task: Task) -> dict[str, Any]:
    """Return a task's attributes. Containers are copied, tensors and modules are not.

    So a task replaces a tensor that it notes during an update and does not change it in place.
    """
    return {name: copy_containers(value) for name, value in vars(task).items()}


def take_back(task: Task, notes: dict[str, Any]) -> None:
    """Forget what a task noted since `notes_of`, whose result may be used once."""
    for name in vars(task).keys() - notes.keys():
        delattr(task, name)
    for name, value in notes.items():
        setattr(task, name, value)


def copy_containers(value: Any) -> Any:
    """Copy dicts, lists and sets all the way down, and nothing else: tensors and modules stay themselves."""
    if type(value) is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) in (list, set):
        return type(value)(copy_containers(item) for item in value)
    return value
