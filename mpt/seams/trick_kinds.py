"""Further things that some memory tricks do, one class each: a trick derives from those that it implements.

The engine asks `isinstance`: a trick that derives from none of them has nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from mpt.seams.phases import NOTHING, Phase
from mpt.seams.run import MemoryTrick
from mpt.seams.samples import Batch
from mpt.seams.task import Task


class HoldsWeights(MemoryTrick):
    """A trick that holds weights in another way: packed, on the host, with adapters."""

    def pack_weights(self, networks: Mapping[str, nn.Module]) -> None:
        """Put other tensors in the places of weights: on the CPU or `meta`, before any trick chooses by their sizes."""

    def host(self, networks: Mapping[str, nn.Module], device: torch.device) -> None:
        """Choose weights that do not go to the device: before the networks, on the CPU or `meta`, are moved there.

        A layer's attribute `travelling_names` has the names of its parameters that stay.
        """

    def check_start(self) -> None:
        """Raise CheckpointError if no run could begin with the file that is named, before anything is built."""

    def begin(self, task: Task) -> str | None:
        """Read what the run begins with, after `apply`; return a line about it.

        Not called for plans, inference and runs that a checkpoint restores.
        """
        return None

    def fold(self, modules: Mapping[str, nn.Module]) -> None:
        """Take out of trained networks what was put into them, for export: adapters become part of their weights."""


def fold(tricks: Iterable[MemoryTrick], modules: Mapping[str, nn.Module]) -> None:
    """Take out of trained networks what tricks have put into them."""
    for trick in tricks:
        if isinstance(trick, HoldsWeights):
            trick.fold(modules)


class TakesUpdates(MemoryTrick):
    """A trick that performs whole updates."""

    private_pool: Callable[[], AbstractContextManager[Any]] = staticmethod(lambda: NOTHING)
    """What a plan enters around an update that takes its memory from a pool of its own; the planner sets it."""
    news: list[str]
    """What has happened since the last line of the log that a user should read there."""

    def update(
        self, phase: Phase, batch: Batch, is_logged: bool, perform: Callable[[Batch, bool], Any]
    ) -> Any:
        """Return the result of `perform(batch, is_logged)`, by calling it or by repeating what a call of it did."""
        return perform(batch, is_logged)


class BetweenSteps(MemoryTrick):
    """A trick that makes room for what a run does between its steps."""

    def beside_steps(self) -> AbstractContextManager[Any]:
        """Return the context of an evaluation, a preview, samples."""
        return NOTHING
