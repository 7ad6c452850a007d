"""The source line of a forward call for each autograd node that it made, so that a backward operator has a line."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mpt.nn.shared.module_places import source_line
from mpt.planner.device.kept_modes import KeptInBackward


class ForwardLines(KeptInBackward):
    """Notes the lines of all calls of torch's functions within its block."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, str] = {}

    def handle(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function and note its line."""
        made = func(*args, **kwargs)
        self.note(made)
        return made

    def note(self, made: Any) -> None:
        """Give the line that is running to the autograd nodes behind what a call made, but for those that have one."""
        pending: list[Any] = [one.grad_fn for one in tree_leaves(made) if isinstance(one, Tensor)]
        pending = [node for node in pending if node is not None and node not in self.lines]
        line = source_line() if pending else ""
        while pending:
            node = pending.pop()
            if node is not None and node not in self.lines:
                self.lines[node] = line
                pending += [following for following, _ in node.next_functions]

    def current(self) -> str:
        """Return the line whose backward runs now; "" for a call that was not seen."""
        return self.lines.get(torch._C._current_autograd_node(), "")
