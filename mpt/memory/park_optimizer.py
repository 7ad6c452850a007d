"""Move the optimizer's state to host memory while the run evaluates or draws samples.

Training that fits can run out of memory outside its steps: a large batch of samples, an evaluation's networks. Adam's
averages, twice the weights, have nothing to do then; they go to the host before and come back after, to the bit. Each
evaluation, preview and look at samples costs two copies of the state. `mpt plan` says when it makes room.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mpt.accelerator import copies_beside
from mpt.config.options import Options
from mpt.seams import BetweenSteps, Run

CONFLICTS = {
    "cpu_optimizer": "that one keeps the state in host memory at all times; use one of the two"
}
RELIEVES = "moments"
PROPOSALS = (True,)


class Settings(Options):
    """Nothing to set."""


class ParkOptimizer(BetweenSteps):
    """Exchanges the state's tensors for copies in host memory, and those for copies on the device."""

    name = "park_optimizer"

    def __init__(self) -> None:
        self.run: Run | None = None

    def attach(self, run: Run) -> None:
        """Remember the run, whose optimizers may still be replaced by another trick."""
        self.run = run
        if run.device.type == "cpu":
            run.notes.append(
                "memory.park_optimizer: on a CPU the optimizer's state is in host memory already"
            )

    @contextlib.contextmanager
    def beside_steps(self) -> Iterator[None]:
        """Keep the state off the device inside the block."""
        parked: list[tuple[dict[str, Any], str, torch.device]] = []
        try:
            for state, name in list(self.on_device()):
                parked.append((state, name, copy_into(state, name, torch.device("cpu"))))
            yield
        finally:  # also if the host had no room for all of it
            for state, name, device in parked:
                copy_into(state, name, device)

    def on_device(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the state's tensors that are on the device, each as a mapping and the key in it; numbers stay."""
        # nothing is trained, or the state is on the host
        if self.run is None or self.run.device.type == "cpu":
            return
        kind = self.run.device.type
        for state in (
            one for optimizer in self.run.optimizers.values() for one in optimizer.state.values()
        ):
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.device.type == kind:
                    yield state, name


@torch.no_grad()
def copy_into(state: dict[str, Any], name: str, device: torch.device) -> torch.device:
    """Put a copy on a device in a tensor's place; return that tensor's device."""
    value: Tensor = state[name]
    if hasattr(value, "__tensor_flatten__"):  # torchao's, of several tensors
        state[name] = value.to(device)
    else:
        pins = device.type == "cpu" and copies_beside(value.device)
        state[name] = torch.empty_like(value, device=device, pin_memory=pins).copy_(value)
    return value.device


def build(settings: Settings) -> ParkOptimizer:
    """Build the trick."""
    return ParkOptimizer()
