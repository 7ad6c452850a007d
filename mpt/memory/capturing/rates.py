"""Optimizers whose step a recording can hold: rates and counts of steps in memory of the device.

A kernel that was recorded with a number keeps it. So while an update is performed or recorded, an optimizer's groups
have a tensor for their rate, and torch's optimizers count their steps on the device (`capturable`), or in SGD's case
use the kernel that reads the rate there (`fused`). Outside of updates the groups are as the run made them: the loop
sets numbers, and checkpoints are those of any run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

SWITCHES = ("capturable", "fused")
"""The setting of torch's optimizers that reads the rate on the device, the first that one has."""

WARNED = "_warned_capturable_if_run_uncaptured"
"""Torch's note on an optimizer whose user it has warned of steps outside of recordings."""


def why_not(optimizer: Optimizer) -> str:
    """Return why an optimizer's step cannot be recorded; "" if it can."""
    if takes_tensors(optimizer) or any(name in optimizer.param_groups[0] for name in SWITCHES):
        return ""
    return f"{type(optimizer).__name__} computes its steps from numbers of the host"


def takes_tensors(optimizer: Optimizer) -> bool:
    """Return whether an optimizer of ours says that its rate may be a tensor."""
    return bool(getattr(optimizer, "takes_tensors", False))


class Rates:
    """The rates of one optimizer on the device, and its groups' counters in Python."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self.groups = optimizer, optimizer.param_groups
        self.state = optimizer.state
        self.tensors = [torch.zeros((), device=device) for _ in self.groups]
        self.written = [0.0] * len(self.tensors)
        self.increments: dict[tuple[int, str], int] = {}
        setattr(optimizer, WARNED, True)  # the first updates of each run are not recorded
        for parameter, entries in optimizer.state.items():
            step = entries.get("step")
            # of a run without recordings
            if isinstance(step, Tensor) and step.device != parameter.device:
                entries["step"] = step.to(parameter.device, torch.float32)

    @property
    def is_stale(self) -> bool:
        """Whether the optimizer's state was replaced, as by a rollback."""
        return (
            self.optimizer.state is not self.state or self.optimizer.param_groups is not self.groups
        )

    def write(self) -> None:
        """Bring rates that have changed to the device."""
        for number, (group, tensor) in enumerate(zip(self.groups, self.tensors, strict=True)):
            if self.written[number] != group["lr"]:
                tensor.fill_(group["lr"])
                self.written[number] = group["lr"]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the groups have tensors for rates inside the block."""
        before = [
            {name: group[name] for name in ("lr", "foreach", *SWITCHES) if name in group}
            for group in self.groups
        ]
        for group, tensor in zip(self.groups, self.tensors, strict=True):
            group["lr"] = tensor
            if takes_tensors(self.optimizer):
                continue
            switch = next(name for name in SWITCHES if name in group)
            group[switch] = True
            if switch == "fused":
                group["foreach"] = False  # which would come first, and read the rate on the host
        try:
            yield
        finally:
            for group, values in zip(self.groups, before, strict=True):
                group.update(values)

    def counts(self) -> dict[tuple[int, str], int]:
        """Return the whole numbers of the groups."""
        return {
            (number, name): value
            for number, group in enumerate(self.groups)
            for name, value in group.items()
            if type(value) is int
        }

    def learn(self, before: dict[tuple[int, str], int]) -> None:
        """Take the increments of the groups' counters since `before` as those of every update."""
        self.increments = {
            key: value - before[key] for key, value in self.counts().items() if value != before[key]
        }

    def count(self) -> None:
        """Count an update that was repeated."""
        for (number, name), increment in self.increments.items():
            self.groups[number][name] += increment

    def put_back(self, counts: dict[tuple[int, str], int]) -> None:
        """Set the counts as `counts` has them."""
        for (number, name), value in counts.items():
            self.groups[number][name] = value
