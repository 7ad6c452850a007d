"""The learning rate as a pure function of the step.

There is no scheduler object, so there is nothing to save, and a step whose update was skipped for overflow advances
nothing wrongly. `total_steps` is the length of the whole run: a run that is made longer by a later resume changes the
curve of every schedule but `constant`.

Sources: cosine, Loshchilov & Hutter, "SGDR", 2017, equation 5 without restarts; one cycle, Smith & Topin,
"Super-Convergence", 2018, with the cosine ramps that torch.optim.lr_scheduler.OneCycleLR defaults to; linear warm-up,
Goyal et al., 2017, section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpt.config.options import OptimizerOptions

if TYPE_CHECKING:
    from torch.optim import Optimizer

ONE_CYCLE_RISE = 0.3  # share of the run spent rising, unless warmup_steps says otherwise
ONE_CYCLE_START = 1 / 25  # of the peak
ONE_CYCLE_END = ONE_CYCLE_START / 1e4


def learning_rate(settings: OptimizerOptions, step: int, total_steps: int, base_lr: float) -> float:
    """Return the rate of step `step` (from 0) of a run of `total_steps`; beyond its end, that of the end.

    `base_lr` is the peak. With warm-up, steps 0 to `warmup_steps - 1` rise linearly to it and the schedule proper fills
    the rest of the run.
    """
    if settings.schedule == "one_cycle":
        rise_steps = settings.warmup_steps or round(ONE_CYCLE_RISE * total_steps)
        if step < rise_steps:
            return base_lr * cosine_between(ONE_CYCLE_START, 1.0, step / rise_steps)
        return base_lr * cosine_between(1.0, ONE_CYCLE_END, progress(step, rise_steps, total_steps))
    if step < settings.warmup_steps:
        return base_lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return base_lr
    done = progress(step, settings.warmup_steps, total_steps)
    return base_lr * (
        cosine_between(1.0, 0.0, done) if settings.schedule == "cosine" else 1.0 - done
    )


def set_learning_rates(
    optimizers: Mapping[str, Optimizer],
    settings: Mapping[str, OptimizerOptions],
    step: int,
    total_steps: int,
    factor: float = 1.0,
) -> None:
    """Set a step's rate, times the factor, in every group of the optimizers, whose settings have the same names."""
    for name, optimizer in optimizers.items():
        own = settings[name]
        rate = learning_rate(own, step, total_steps, own.lr) * factor
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)


def progress(step: int, start: int, end: int) -> float:
    """Return how far `step` lies between `start` and `end`, from 0 to 1."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def cosine_between(first: float, last: float, done: float) -> float:
    """Return the value on a half cosine from `first` (`done` 0) to `last` (`done` 1)."""
    return last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * done))
