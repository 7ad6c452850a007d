"""The decision after a step went wrong: NaN, a scale at its floor, a poisoned state. Decides; the loop acts.

Each recovery is an event in the log, each gives up after a bound, and none of them writes a checkpoint of broken state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch

from mpt.engine.recovery.diagnosis import find_first_non_finite
from mpt.engine.state.journal import Journal
from mpt.engine.step.step import Update, whole_batch
from mpt.errors import NonFiniteError
from mpt.precision.shared.module_state import module_state
from mpt.run.checkpoints.state_checks import first_non_finite_on_ranks
from mpt.seams import Phase, Run

FLOOR_PATIENCE = 3
SKIP_PATIENCE = 10


@dataclass(frozen=True)
class Decision:
    """The action for the loop, and its reason."""

    action: Literal["go_on", "fall_back", "roll_back", "stop"]
    why: str = ""
    phase: Phase | None = None
    """The phase whose update is to be looked into before stopping."""


GO_ON = Decision("go_on")


def after_non_finite(run: Run, phase: Phase, step: int, in_a_row: int, rollbacks: int) -> Decision:
    """Decide about a NaN or infinite loss as `train.on_non_finite` says. `in_a_row` counts such steps, this one too."""
    settings = run.config.train
    weights = {
        name: module_state(run.precision, module) for name, module in run.task.trainable.items()
    }
    is_skipped = (
        settings.on_non_finite == "skip" and first_non_finite_on_ranks(weights, run.world) is None
    )
    if is_skipped:
        if in_a_row <= SKIP_PATIENCE:
            return GO_ON
        return Decision("stop", f"{SKIP_PATIENCE} steps in a row were not finite", phase)
    if settings.on_non_finite == "stop" or rollbacks >= settings.max_rollbacks:
        after = f" after {rollbacks} rollbacks" if rollbacks else ""
        return Decision(
            "stop", f"the loss of {phase.name} is not finite at step {step}{after}", phase
        )
    if (scale := overflowed_static_scale(run)) is not None and not has_remedy(run):
        why = f"gradients overflowed at precision.loss_scale={scale:.10g}, which is static: no step is skipped for it"
        return Decision(
            "stop",
            f"{phase.name} is not finite at step {step}: {why}, and a rollback would repeat it",
            phase,
        )
    return Decision("roll_back", f"{phase.name} was not finite at step {step}")


def overflowed_static_scale(run: Run) -> float | None:
    """Return a loss scale that never falls and at which gradients overflowed, None if there is none."""
    scalers = run.precision.scalers.values()
    return next(
        (scaler.scale for scaler in scalers if not scaler.dynamic and scaler.has_overflowed), None
    )


def has_remedy(run: Run) -> bool:
    """Return whether the settings change anything after a rollback, which else repeats the same steps."""
    settings = run.config.precision.settings
    return settings.auto_keep_fp32 or any(
        action != "repeat" for action in run.config.train.after_rollback
    )


def at_floor(run: Run, updates: Mapping[str, Update]) -> Decision:
    """Decide about a scale that sits at its floor and still overflows, as `precision.at_min_scale` says."""
    for phase in run.phases:
        scaler = run.precision.scalers.get(phase.name)
        if (
            scaler is None
            or scaler.overflows_at_floor < FLOOR_PATIENCE
            or phase.name not in updates
        ):
            continue
        why = f"{phase.name}: gradients overflow at the smallest loss scale, {scaler.scale:.10g}"
        falls_back = run.config.precision.settings.at_min_scale == "fall_back"
        return Decision("fall_back" if falls_back else "stop", why, phase)
    return GO_ON


def with_poisoned_state(run: Run, bad: str, rollbacks: int) -> Decision:
    """Decide about a state with NaN in it, which is not saved: roll back while that is allowed."""
    settings = run.config.train
    if settings.on_non_finite == "rollback" and rollbacks < settings.max_rollbacks:
        return Decision("roll_back", f"{bad} is not finite")
    return Decision("stop", bad)


def stop(run: Run, journal: Journal, phase: Phase, done: Update, why: str) -> NoReturn:
    """Raise NonFiniteError naming the first bad module and operator of an update that was skipped."""
    culprit = find_first_non_finite(run, phase, whole_batch(run, done)).text
    journal.event("stopped", f"{why}; first at {culprit}")
    remedies = ["a lower optimizer.lr", "optimizer.clip_grad_norm=1"]
    if any(not scaler.dynamic for scaler in run.precision.scalers.values()):
        remedies = ["precision.loss_scale=dynamic", "a lower one", *remedies]
    if run.precision.numerics.dtype != torch.float32:
        remedies.append("precision=fp32")
    tried = f"{', '.join(remedies[:-1])} or {remedies[-1]}"
    raise NonFiniteError(
        f"{why}. First bad value: {culprit}. Try {tried}; `mpt doctor RUN` looks for the cause and a cure"
    )
