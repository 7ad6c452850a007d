"""A built training, everything that an update needs, and the memory tricks that are attached to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.config.schema import Config
from mpt.parallel.world import ALONE, World
from mpt.seams.phases import NOTHING, Phase
from mpt.seams.precision import Precision
from mpt.seams.samples import Batch, DataSpec
from mpt.seams.task import Task
from mpt.seams.undo import BufferCopies


class MemoryTrick:
    """One way to hold less; never a branch in the step or the loop.

    It meets the run when the networks are built (`pack_weights`, then `host`), when the task is and before precision
    and optimizers are (`apply`), when the optimizers are (`replace_optimizer`), when everything is built (`attach`),
    and in every update (`forward`, `backward`, `step`: contexts around those moments; `update`: all of it).
    `beside_steps` is a context around evaluations and samples.
    """

    name: str
    exact: bool = True
    """Are gradients bit-equal to the run without it?"""
    host_bytes: int = 0
    """Host memory that it holds beyond the weights, gradients and optimizer states that are there, for plans."""
    releases_gradients: bool = False
    """Are gradients released during the backward, so that there is no norm of all of them?"""
    keeps_gradients: bool = False
    """Are gradients filled with zeros when an update begins, instead of released?"""
    takes_updates: bool = False
    """Does `update` perform the run's updates?"""
    private_pool: Callable[[], AbstractContextManager[Any]] = staticmethod(lambda: NOTHING)
    """What a plan enters around an update that takes its memory from a pool of its own; the planner sets it."""
    news: list[str] | None = None
    """What has happened since the last line of the log that a user should read there."""

    def pack_weights(self, networks: Mapping[str, nn.Module]) -> None:
        """Put other tensors in the places of weights: on the CPU or `meta`, before any trick chooses by their sizes."""

    def host(self, networks: Mapping[str, nn.Module], device: torch.device) -> None:
        """Choose weights that do not go to the device: before the networks, on the CPU or `meta`, are moved there.

        A layer's attribute `travelling_names` has the names of its parameters that stay.
        """

    def apply(self, task: Task, precision: Precision) -> None:
        """Change the built task, before optimizers exist."""

    def begin(self, task: Task) -> str | None:
        """Read what the run begins with, after `apply`; return a line about it.

        Not called for plans, inference and runs that a checkpoint restores.
        """
        return None

    def replace_optimizer(self, optimizer: Optimizer, precision: Precision) -> Optimizer:
        """Return the optimizer that takes this one's place. ConfigError if none can."""
        return optimizer

    def attach(self, run: Run) -> None:
        """Prepare the built run for its first step: hooks, choices that need all of it, notes."""

    def fold(self, modules: Mapping[str, nn.Module]) -> None:
        """Take out of trained networks what was put into them, for export: adapters become part of their weights."""

    def abandon(self, phase: Phase) -> None:
        """Forget what was begun of a phase's update that failed and will be repeated."""

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of one forward."""
        return NOTHING

    def backward(self, phase: Phase) -> AbstractContextManager[Any]:
        """Return the context of one loss's backward."""
        return NOTHING

    def step(self, phase: Phase) -> AbstractContextManager[Any]:
        """Return the context of a phase's optimizer step, unscaling and clipping included."""
        return NOTHING

    def update(self, phase: Phase, batch: Batch, is_logged: bool, perform: Callable[[Batch, bool], Any]) -> Any:
        """Return the result of `perform(batch, is_logged)`, by calling it or by repeating what a call of it did.

        Asked of the trick with `takes_updates`.
        """
        return perform(batch, is_logged)

    def beside_steps(self) -> AbstractContextManager[Any]:
        """Return the context of what the run does between its steps: an evaluation, a preview, samples."""
        return NOTHING


@dataclass
class Adaptation:
    """How a run fits into memory by now, which may change after every update that ran out of it."""

    is_allowed: bool = False
    """Whether the run may adapt to a lack of memory, or fails."""
    micro_batch_size: int | None = None
    """Samples that go through the networks at once; None is the whole batch."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Memory tricks that were set since the build because memory ran out, in the configuration's words."""


@dataclass(frozen=True)
class Run:
    """A built training: everything that an update needs, and nothing of files or the loop.

    None of it is exchanged after the build. What changes is inside: weights, `adaptation`, and the list of tricks,
    which adaptation and watchers add to.
    """

    config: Config
    device: torch.device
    data: DataSpec
    task: Task
    precision: Precision
    tricks: list[MemoryTrick]
    optimizers: dict[str, Optimizer]
    optimizer_settings: dict[str, OptimizerOptions]
    phases: list[Phase]
    frozen: dict[str, list[nn.Parameter]]
    """Phase name -> parameters of the other trained modules, frozen meanwhile."""
    weights: dict[str, list[nn.Parameter]]
    """Phase name -> the weights that its update changes and their masters."""
    clip_norms: dict[str, float | None]
    buffers: BufferCopies
    """Buffers of the trained networks, which a skipped step must leave as they were."""
    stable_forms: AbstractContextManager[Any] = NOTHING
    """What computes numerically poor forms by stable ones in each forward (`precision.stable_forms`)."""
    adaptation: Adaptation = field(default_factory=Adaptation)
    notes: list[str] = field(default_factory=list)
    """What a user should be warned of."""
    messages: list[str] = field(default_factory=list)
    """What was done while building that a user should know: weights that were loaded."""
    averages: Mapping[str, nn.Module] = field(default_factory=dict)
    """Name of a module of the task -> the moving average of it that is evaluated (`train.ema`)."""
    world: World = ALONE
    """The processes that train together."""
    keeps_gradients: bool = False
    """Gradients are filled with zeros when an update begins, instead of released."""
