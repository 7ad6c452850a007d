"""For undoing an update that fails before its optimizer steps: a task's notes on itself, and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpt.seams.task import Task


def notes_of(task: Task) -> dict[str, Any]:
    """Return a task's attributes. Containers are copied, tensors and modules are not.

    So a task replaces a tensor that it notes during an update and does not change it in place.
    """
    return {name: copy_containers(value) for name, value in vars(task).items()}


def take_back(task: Task, notes: dict[str, Any]) -> None:
    """Discard a task's notes since `notes_of`, whose result may be used once."""
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


class BufferCopies:
    """Buffers that a forward changes (BatchNorm's statistics) and their copies, so that a skipped step leaves no trace.

    A forward that overflows would otherwise leave NaN in the running statistics for good, with every weight still
    finite. The copies are made at the first update.
    """

    def __init__(self, buffers: Sequence[Tensor] = ()) -> None:
        self.buffers = list(buffers)
        self.copies: list[tuple[list[Tensor], list[Tensor]]] = []
        """By dtype: if they are mixed, CUDA launches a kernel for each buffer."""

    def remember(self) -> None:
        """Copy the buffers."""
        if not self.copies:
            for dtype in dict.fromkeys(buffer.dtype for buffer in self.buffers):
                buffers = [buffer for buffer in self.buffers if buffer.dtype == dtype]
                self.copies.append((buffers, [torch.empty_like(buffer) for buffer in buffers]))
        for buffers, copies in self.copies:
            torch._foreach_copy_(copies, buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back as they were when they were copied."""
        for buffers, copies in self.copies:
            torch._foreach_copy_(buffers, copies)
