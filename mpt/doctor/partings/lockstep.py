"""Trainings that are taken step by step side by side in one process, each with random numbers of its own.

Each has its own random state, which is put in place before its step and taken back after it, and sets torch's switches
for itself, so that none meets the effects of another. A `moved` step is the training's own with weights and inputs that
are moved by up to half a unit in the last place of some dtype while gradients are computed: the result is as far off
as rounding alone would make it.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from mpt.config.checking.precision_names import FLOAT32
from mpt.config.load import change_precision
from mpt.config.schema import Config
from mpt.data.loading.loader import to_device
from mpt.doctor.measuring.measured_step import (
    HALVINGS,
    Step,
    half_as_on_a_gpu,
    moved_weights,
    repeat_backward,
)
from mpt.engine.building.build import build_run
from mpt.engine.building.torch_settings import prepare_torch
from mpt.engine.loop.assembly import count_steps, supply_batches
from mpt.engine.state.moving_averages import follow_step
from mpt.engine.state.state import capture, capture_random, restore, restore_random
from mpt.engine.step.step import back_propagate, drop_gradients, update
from mpt.optim.shared.schedules import set_learning_rates
from mpt.precision.shared.module_state import module_state
from mpt.precision.shared.products import set_products
from mpt.seams import Batch, Dataset, Phase, Run
from mpt.seams.phase_losses import draw_batch
from mpt.seams.task_kinds import rate_factor
from mpt.seams.undo import notes_of, take_back


class Training:
    """One training of the lockstep, at the step that `restore_at` set, 0 to begin with."""

    def __init__(self, config: Config, device: torch.device, data: Dataset) -> None:
        self.config, self.data = config, data
        self.code: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Makes the parts that it was built of those that are imported, for a block."""
        prepare_torch(config)
        self.loader = supply_batches(config, data)
        self.total_steps = count_steps(config, self.loader)
        self.run: Run = build_run(config, device, data.spec)
        self.random = capture_random(device)
        self.settled: dict[str, float] = {}
        """Phase -> the loss scale that its first steps were repeated at."""

    def float32_twin(self) -> Training:
        """Return the same training in float32, at its beginning."""
        with self.code():
            return Training(change_precision(self.config, FLOAT32), self.run.device, self.data)

    @property
    def unit(self) -> float:
        """The relative distance of neighbouring numbers in the dtype in which this training computes most."""
        numerics = self.run.precision.numerics
        return numerics.product_unit or torch.finfo(numerics.dtype).eps

    def batch(self, step: int) -> Batch:
        """Return a step's batch on the device, as the task sees it."""
        return to_device(next(iter(self.loader.batches(step))), self.run.device, self.run.data)

    def due(self, step: int) -> list[Phase]:
        """Return the phases of a step."""
        return [phase for phase in self.run.phases if phase.is_due(step)]

    @contextlib.contextmanager
    def in_turn(self, step: int) -> Iterator[None]:
        """Put this training's random state, learning rates and switches in place for the block."""
        run = self.run
        prepare_torch(self.config)
        set_products(self.config.precision.settings, run.precision.numerics.dtype)
        restore_random(self.random, run.device)
        set_learning_rates(
            run.optimizers, run.optimizer_settings, step, self.total_steps, rate_factor(run.task)
        )
        try:
            yield
        finally:
            self.random = capture_random(run.device)

    def update(self, phase: Phase, batch: Batch) -> tuple[dict[str, float], bool]:
        """Perform a phase's update as the loop does; return its losses and whether the step was skipped.

        A step that a dynamic loss scale would skip is repeated at the lower one: the comparison is of the training
        after the scale has found its level. `settled` keeps the scales that were found.
        """
        run, scaler = self.run, self.run.precision.scalers.get(phase.name)
        for _ in range(HALVINGS):
            random, notes, scale = (
                capture_random(run.device),
                notes_of(run.task),
                scaler.scale if scaler else 1.0,
            )
            with half_as_on_a_gpu(run):
                done = update(run, phase, batch)
            losses = {f"{phase.name}/{name}": float(value) for name, value in done.losses.items()}
            overflowed = done.stats.skipped and all(
                math.isfinite(value) for value in losses.values()
            )
            if scaler is None or not scaler.dynamic or not overflowed:
                break
            scaler.scale = scale / 2
            self.settled[phase.name] = scaler.scale
            restore_random(random, run.device)
            take_back(run.task, notes)
        return losses, done.stats.skipped

    def moved_update(
        self, phase: Phase, batch: Batch, amount: float
    ) -> tuple[dict[str, float], bool]:
        """Perform a phase's update with gradients of weights and inputs that are moved by up to a share of them."""
        run = self.run
        drop_gradients(run, phase)
        run.buffers.remember()
        drawn = draw_batch(run, phase, batch)
        with half_as_on_a_gpu(run), moved_weights(run, amount) as move:
            found = back_propagate(run, phase, {name: move(value) for name, value in drawn.items()})
        losses = {f"{phase.name}/{name}": float(value) for name, value in found.items()}
        if not all(math.isfinite(value) for value in losses.values()):
            drop_gradients(run, phase)
            run.buffers.restore()
            return losses, True
        return losses, run.precision.step(phase, run.clip_norms[phase.name]).skipped

    def look(self, phase: Phase, batch: Batch, amount: float | None = None) -> Step:
        """Take forward and backward of a phase under exact instruments; the state stays as it was.

        With an amount weights and inputs are moved by up to that share of them.
        """
        before = capture_random(self.run.device)
        scaler = self.run.precision.scalers.get(phase.name)
        scale = scaler.scale if scaler is not None else 1.0
        if scaler is not None:
            scaler.scale = min(scale, self.settled.get(phase.name, scale))
        try:
            if amount is None:
                return repeat_backward(
                    self.run, phase, batch, watched=True, exact=True, reseeds=False
                )
            with moved_weights(self.run, amount) as move:
                moved = {name: move(value) for name, value in batch.items()}
                return repeat_backward(
                    self.run, phase, moved, watched=True, exact=True, reseeds=False
                )
        finally:
            restore_random(before, self.run.device)
            if scaler is not None:
                scaler.scale = scale

    def after_step(self, step: int) -> None:
        """Let the task follow a finished step."""
        follow_step(self.run, step)

    def weights(self) -> dict[str, Tensor]:
        """Return all weights and buffers by dotted name, in float32 if they have a float32 master."""
        return {
            f"{name}.{key}": value
            for name, module in self.run.task.modules.items()
            for key, value in module_state(self.run.precision, module).items()
        }

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the whole state."""
        return copy.deepcopy({**capture(self.run), "random": self.random})

    def restore(self, state: dict[str, Any]) -> None:
        """Put a state back. Raises CheckpointError for one of another training."""
        restore(self.run, copy.deepcopy(state))
        self.random = copy.deepcopy(state["random"])
