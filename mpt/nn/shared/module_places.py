"""Which module an operator belongs to, in forward and in backward: for whoever watches operators.

A forward operator belongs to the innermost module that is running, a backward operator to the module whose forward made
its autograd node.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpt.nn.shared.named_modules import named_modules
from mpt.outside.own_code import folder_of

LOSS = "the loss"
"""The owner of an operator outside of every module."""
SKIPPED_FOLDERS = tuple(
    map(folder_of, ("torch", "mpt.doctor", "mpt.engine", "mpt.planner", "mpt.precision"))
)


@dataclass
class ModulePlaces:
    """Follows the modules of a step."""

    running: list[str] = field(default_factory=list)
    """The modules that are running, outermost first."""
    nodes: dict[Any, str] = field(default_factory=dict)
    """Autograd node -> the module that made it."""

    def current(self) -> tuple[str, bool]:
        """Return the module of the operator that runs now, and whether it runs in backward."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return self.nodes.get(node, LOSS), True
        return self.running[-1] if self.running else LOSS, False

    def tag(self, outputs: Any, path: str) -> None:
        """Give the autograd nodes behind a module's outputs to it, but for those that an inner module has."""
        pending: list[Any] = [
            t.grad_fn
            for t in tree_leaves(outputs)
            if isinstance(t, Tensor) and t.grad_fn is not None
        ]
        while pending:
            node = pending.pop()
            if node is None or node in self.nodes:
                continue
            self.nodes[node] = path
            pending += [following for following, _ in node.next_functions]


@contextmanager
def module_places(modules: Mapping[str, nn.Module]) -> Iterator[ModulePlaces]:
    """Follow the modules within the block; `modules` are the networks by name."""
    places = ModulePlaces()
    handles: list[Any] = []

    def enter(path: str) -> Any:
        return lambda *_: places.running.append(path)

    def leave(path: str) -> Any:
        def hook(module: nn.Module, args: Any, outputs: Any) -> None:
            if places.running:
                places.running.pop()
            if outputs is not None:
                places.tag(outputs, path)

        return hook

    for name, module in named_modules(modules):
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave(name), always_call=True))
    try:
        yield places
    finally:
        places.nodes.clear()
        for handle in handles:
            handle.remove()


def source_line() -> str:
    """Return "file:line" of the innermost frame that is neither torch's nor an instrument's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(SKIPPED_FOLDERS) and not name.startswith("<"):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
