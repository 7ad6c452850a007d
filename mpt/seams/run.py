"""A built training, everything that an update needs, and the memory tricks that are attached to it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.config.schema import Config
from mpt.parallel.world import ALONE, World
from mpt.seams.phases import NOTHING, Phase
from mpt.seams.precision import Precision
from mpt.seams.samples import DataSpec
from mpt.seams.task import Task
from mpt.seams.undo import BufferCopies


class MemoryTrick:
    """One way to hold less; never a branch in the step or the loop.

    It meets the run when the task is built and before precision and optimizers are (`apply`), when the optimizers are
    (`replace_optimizer`), when everything is built (`attach`), and in every update (`forward`, `backward`, `step`:
    contexts around those moments). What few tricks do has a class of its own each (`mpt.seams.trick_kinds`): weights
    that are held in another way, whole updates, work between steps.
    """

    name: str
    exact: bool = True
    """Are gradients bit-equal to the run without it?"""
    host_bytes: int = 0
    """Host memory that it holds beyond the weights, gradients and optimizer states that are there, for plans."""
    gradients: Literal["released", "zeroed", "consumed"] = "released"
    """The fate of an update's gradients when the next one begins: released, or filled with zeros. Consumed ones are
    released during the backward, each by itself, so that there is no norm of all of them."""

    def apply(self, task: Task, precision: Precision) -> None:
        """Change the built task, before optimizers exist."""

    def replace_optimizer(self, optimizer: Optimizer, precision: Precision) -> Optimizer:
        """Return the optimizer that takes this one's place. ConfigError if none can."""
        return optimizer

    def attach(self, run: Run) -> None:
        """Prepare the built run for its first step: hooks, choices that need all of it, notes."""

    def abandon(self, phase: Phase) -> None:
        """Discard the begun update of a phase that failed and will be repeated."""

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of one forward."""
        return NOTHING

    def backward(self, phase: Phase) -> AbstractContextManager[Any]:
        """Return the context of one loss's backward."""
        return NOTHING

    def step(self, phase: Phase) -> AbstractContextManager[Any]:
        """Return the context of a phase's optimizer step, unscaling and clipping included."""
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

    None of it is exchanged after the build. Changes are inside: weights, `adaptation`, and the list of tricks,
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
    """The mode that replaces numerically poor forms by stable ones in each forward (`precision.stable_forms`)."""
    adaptation: Adaptation = field(default_factory=Adaptation)
    notes: list[str] = field(default_factory=list)
    """Warnings for the user."""
    messages: list[str] = field(default_factory=list)
    """Notes about the build for the user: weights that were loaded."""
    averages: Mapping[str, nn.Module] = field(default_factory=dict)
    """Name of a module of the task -> the moving average of it that is evaluated (`train.ema`)."""
    given_averages: list[str] = field(default_factory=list)
    """The averages that began as those of a file (`model.weights`), which no ramp may replace."""
    world: World = ALONE
    """The processes that train together."""
    keeps_gradients: bool = False
    """Gradients are filled with zeros when an update begins, instead of released."""
