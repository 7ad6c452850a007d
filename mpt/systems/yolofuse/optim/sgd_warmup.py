"""SGD as YOLO is trained: momentum and the rate of the biases warm up alongside the rate, and the rate has a floor.

For `warmup` steps the rate of weights rises from 0, that of biases falls from `warmup_bias_lr`, and momentum rises from
`warmup_momentum`, all linear in the step. The schedule runs from the first step on, below the warm-up, and ends at
`last_lr` of the rate instead of 0. Weights decay, biases and normalisation do not (`no_decay`). Ultralytics counts its
schedule in epochs, this one in steps; the published recipe is otherwise the same (tests/systems/yolofuse).

If a card holds batches of 16 only, YOLO accumulates 64 / 16 = 4 of them per step, and in the warm-up fewer, from one
on: `accumulation`. The warm-up then counts those batches, not steps. Batches are counted in the optimizer's groups, and
`batches_of_step` says how many the next step has: task `detect` takes that many of its samples, and leaves the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

import torch
from pydantic import Field
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.errors import ConfigError
from mpt.optim.shared.groups import Parameters


class Settings(OptimizerOptions):
    lr: float = Field(0.01, gt=0)
    momentum: float = Field(0.937, ge=0, lt=1)
    """Momentum factor; 0 is none."""
    weight_decay: float = Field(5e-4, ge=0)
    """Published: 5e-4 at a batch of 64, in proportion to the batch."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    no_decay: list[Literal["bias", "norm", "vector"]] = Field(["bias", "norm"])
    """Groups without weight decay."""
    clip_grad_norm: float | None = Field(10.0, gt=0)
    schedule: Literal["constant", "cosine", "linear", "one_cycle"] = "linear"
    warmup: int = Field(100, ge=0)
    """Steps of warm-up (with `accumulation`, batches); published: 3 epochs, and at least 100."""
    accumulation: float = Field(1.0, ge=1)
    """Batches in a step after the warm-up, as YOLO accumulates 64 / batch; the warm-up begins with one of them."""
    warmup_momentum: float = Field(0.8, ge=0, lt=1)
    """Momentum at the start of the warm-up."""
    warmup_bias_lr: float = Field(0.1, ge=0)
    """Initial rate of the biases."""
    last_lr: float = Field(0.01, ge=0, le=1)
    """End of the schedule, as a share of the rate."""
    foreach: bool | None = None
    """One kernel over many tensors: faster, with a copy of the parameters' size at its peak. null lets torch choose."""


class WarmupSGD(torch.optim.SGD):
    """SGD that counts its batches in its groups, so that the count is saved and restored with them."""

    settings: Settings

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step with this step's rates and momentum, and put back the rates that were set from outside."""
        given = [group["lr"] for group in self.param_groups]
        warmup = self.settings.warmup
        for group in self.param_groups:
            done = group.setdefault("steps", 0)
            batches = batches_of_step(done, warmup, self.settings.accumulation)
            last = done + batches - 1
            scheduled = floored(group["lr"], self.settings)
            start = self.settings.warmup_bias_lr if group.get("is_bias") else 0.0
            group["lr"] = warm(start, scheduled, last, warmup)
            # in a recorded step it is a tensor, which nothing may look at
            group["used_lr"] = group["lr"] if isinstance(group["lr"], float) else 1.0
            group["momentum"] = warm(
                self.settings.warmup_momentum, self.settings.momentum, last, warmup
            )
            group["steps"] = done + batches
        try:
            return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, given, strict=True):
                group["lr"] = rate


def floored(rate: float, settings: Settings) -> float:
    """Return the scheduled rate with its floor: the schedule goes to `last_lr` of the rate if others go to 0."""
    if settings.schedule == "constant":
        return rate
    return rate * (1 - settings.last_lr) + settings.lr * settings.last_lr


def warm(start: float, end: float, step: int, steps: int) -> float:
    """Return the value at a step, on a line from `start` at step 0 to `end` at step `steps`, and `end` after it."""
    return end if step >= steps else start + (end - start) * step / steps


def batches_of_step(done: int, warmup: int, accumulation: float) -> int:
    """Return of how many batches the step is made that comes after `done` batches.

    Published: after each batch, a step if those since the last step are as many as are to be accumulated now.
    """
    count = 1
    while count < round(warm(1.0, accumulation, done + count - 1, warmup)):
        count += 1
    return count


def accumulates(optimizer: Optimizer) -> bool:
    """Return whether the optimizer takes less than the batch in its warm-up."""
    return bool(optimizer.param_groups[0].get("accumulation", 1.0) != 1)


def share_of_batch(optimizer: Optimizer) -> Fraction:
    """Return how much of the batch the optimizer's next step takes: all but in the warm-up with `accumulation`."""
    if not accumulates(optimizer):
        return Fraction(1)
    group = optimizer.param_groups[0]
    steps = batches_of_step(group.get("steps", 0), group["warmup"], group["accumulation"])
    return Fraction(steps, round(group["accumulation"]))


def split_biases(parameters: Parameters) -> Parameters:
    """Return named groups with the biases in groups of their own."""
    groups: list[dict[str, Any]] = []
    for group in parameters:
        assert isinstance(group, dict)
        for is_bias in (False, True):
            chosen = [
                n for n, name in enumerate(group["param_names"]) if name.endswith("bias") == is_bias
            ]
            if chosen:
                own = {key: [group[key][n] for n in chosen] for key in ("params", "param_names")}
                groups.append({**group, **own, "is_bias": is_bias})
    return groups


def build(settings: Settings, parameters: Parameters) -> Optimizer:
    """Return the optimizer over `parameters`. Raises ConfigError for a second warm-up."""
    if settings.warmup_steps:
        raise ConfigError(
            "optimizer.warmup_steps: sgd_warmup has a warm-up of its own; set optimizer.warmup instead"
        )
    if parameters and isinstance(parameters[0], dict) and "param_names" in parameters[0]:
        parameters = split_biases(parameters)
    optimizer = WarmupSGD(
        parameters,
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
        foreach=settings.foreach,
    )
    optimizer.settings = settings
    if settings.accumulation > 1:
        # so that the task finds them, whatever the optimizer is wrapped in
        for group in optimizer.param_groups:
            group.update(warmup=settings.warmup, accumulation=settings.accumulation)
    return optimizer
