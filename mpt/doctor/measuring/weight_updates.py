"""The effect of a whole update, with its optimizer, on the weights, and the remainder after rounding.

A weight in half has neighbours that lie further apart than many an update is long: added and rounded, it stays as it
was. An optimizer that computes in half may divide by an epsilon that float16 does not hold, and so by zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpt.doctor.measuring.instrument import real_values
from mpt.doctor.measuring.measured_step import half_as_on_a_gpu
from mpt.engine.building.build import seed_everything
from mpt.engine.step.step import update
from mpt.precision.shared.module_state import module_state
from mpt.seams import Batch, Phase, Run


@dataclass(frozen=True)
class Effect:
    """A parameter's update in a mode, compared with float32's."""

    still: float
    """Share of the elements that move in float32 and do not in the mode."""
    arrived: float
    """Share of float32's update that arrives, along its direction: 1 also if each element is rounded at random."""
    finite: bool


def moves(run: Run, phase: Phase, batch: Batch, scale: float | None) -> dict[str, Tensor]:
    """Return by how much one update at a loss scale moves each weight, in the mode that keeps weights most exactly.

    Empty if the update was skipped. The run is changed by it; learning rates are those that it was built with.
    """
    scaler = run.precision.scalers.get(phase.name)
    if scaler is not None and scale is not None:
        scaler.scale = scale
    seed_everything(run.config.seed)
    before = weights(run)
    with half_as_on_a_gpu(run):
        done = update(
            run,
            phase,
            run.data.as_floats({name: value.to(run.device) for name, value in batch.items()}),
        )
    return (
        {}
        if done.stats.skipped
        else {name: value - before[name] for name, value in weights(run).items()}
    )


def weights(run: Run) -> dict[str, Tensor]:
    """Return a copy of every trained parameter by dotted name, of its master if it has one, float32 on the CPU."""
    found = {}
    for name, module in run.task.modules.items():
        trained = {key for key, parameter in module.named_parameters() if parameter.requires_grad}
        for key, value in module_state(run.precision, module).items():
            if key in trained:
                found[f"{name}.{key}"] = real_values(value.detach()).to(
                    "cpu", torch.float32, copy=True
                )
    return found


def effects(true: Mapping[str, Tensor], seen: Mapping[str, Tensor]) -> dict[str, Effect]:
    """Return parameter -> the fate of its update, for those that move in float32."""
    found = {}
    for name, right in true.items():
        value, length = seen.get(name), float(right.norm())
        if value is None or value.shape != right.shape or not length:
            continue
        moved = right != 0
        found[name] = Effect(
            still=float((value[moved] == 0).float().mean()),
            arrived=float((value.flatten() @ right.flatten()) / length**2),
            finite=bool(torch.isfinite(value).all()),
        )
    return found
