"""Whose state a watched run marks: of an optimizer that steps during backward, one parameter's at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mpt.memory.optimizer_in_backward import narrow
from mpt.planner.trace.watched_run import owners_of, watch_updates

COUNT = 8


class Marks:
    """The part of a recorder that marks, which notes the owners that it is given."""

    def __init__(self) -> None:
        self.owners: list[str] = []

    def mark(self, tensors: Any, category: str, module: str = "") -> None:
        """Note the owner of each optimizer state."""
        self.owners += [
            module for one in tensors if isinstance(one, Tensor) and category == "optimizer state"
        ]


def test_each_step_in_backward_marks_the_state_of_its_own_parameter() -> None:
    net = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(COUNT))
    weights = list(net.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    marks: Any = Marks()
    with watch_updates(marks, [], owners_of({"net": net})):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
            narrow(optimizer, weight, optimizer.param_groups[0])
            optimizer.step()
            optimizer.param_groups[0]["params"] = weights
    assert marks.owners == [f"net.{number}" for number in range(COUNT)]


def test_the_state_of_a_parameter_that_was_made_in_the_place_of_another_is_marked() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    marks: Any = Marks()
    with watch_updates(marks, [], {}):
        for _ in range(COUNT):
            optimizer.state.clear()
            optimizer.state[nn.Parameter(torch.ones(2))] = {"momentum_buffer": torch.ones(2)}
            optimizer.step()
    assert len(marks.owners) == COUNT
