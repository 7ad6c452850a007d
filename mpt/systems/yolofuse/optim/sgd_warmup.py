"""SGD as YOLO is trained: momentum and the rate of the biases warm up beside the rate, and the rate has a floor.

For `warmup` steps the rate of weights rises from 0, that of biases falls from `warmup_bias_lr`, and momentum rises from
`warmup_momentum`, all linear in the step. The schedule runs from the first step on, below the warm-up, and ends at
`last_lr` of the rate instead of 0. Weights decay, biases and normalisation do not (`no_decay`). Ultralytics counts its
schedule in epochs, this one in steps; the published recipe is otherwise the same (tests/systems/yolofuse).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.errors import ConfigError
from mpt.optim.groups import Parameters


class Settings(OptimizerOptions):
    lr: float = Field(0.01, gt=0)
    momentum: float = Field(0.937, ge=0, lt=1)
    """Momentum factor; 0 is none."""
    weight_decay: float = Field(5e-4, ge=0)
    """Published: 5e-4 at a batch of 64, in proportion to the batch."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    no_decay: list[Literal["bias", "norm"]] = Field(["bias", "norm"])
    """What does not decay."""
    clip_grad_norm: float | None = Field(10.0, gt=0)
    schedule: Literal["constant", "cosine", "linear", "one_cycle"] = "linear"
    warmup: int = Field(100, ge=0)
    """Steps of warm-up; published: 3 epochs, and at least 100 steps."""
    warmup_momentum: float = Field(0.8, ge=0, lt=1)
    """Momentum at the start of the warm-up."""
    warmup_bias_lr: float = Field(0.1, ge=0)
    """Where the rate of the biases starts."""
    last_lr: float = Field(0.01, ge=0, le=1)
    """Where the schedule ends, as a share of the rate."""
    foreach: bool | None = None
    """One kernel over many tensors: faster, with a copy of the parameters' size at its peak. null lets torch choose."""


class WarmupSGD(torch.optim.SGD):
    """SGD that counts its steps in its groups, so that the count is saved and restored with them."""

    settings: Settings

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step with this step's rates and momentum, and put back the rates that were set from outside."""
        given = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            count = group.setdefault("steps", 0)
            scheduled = floored(group["lr"], self.settings)
            start = self.settings.warmup_bias_lr if group.get("is_bias") else 0.0
            group["lr"] = warm(start, scheduled, count, self.settings.warmup)
            group["momentum"] = warm(self.settings.warmup_momentum, self.settings.momentum, count, self.settings.warmup)
            group["steps"] = count + 1
        try:
            return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, given, strict=True):
                group["lr"] = rate


def floored(rate: float, settings: Settings) -> float:
    """Return the scheduled rate with its floor: the schedule goes to `last_lr` of the rate where others go to 0."""
    if settings.schedule == "constant":
        return rate
    return rate * (1 - settings.last_lr) + settings.lr * settings.last_lr


def warm(start: float, end: float, step: int, steps: int) -> float:
    """Return the value at a step, on a line from `start` at step 0 to `end` at step `steps`, and `end` after it."""
    return end if step >= steps else start + (end - start) * step / steps


def split_biases(parameters: Parameters) -> Parameters:
    """Return named groups with the biases in groups of their own."""
    groups: list[dict[str, Any]] = []
    for group in parameters:
        assert isinstance(group, dict)
        for is_bias in (False, True):
            chosen = [n for n, name in enumerate(group["param_names"]) if name.endswith("bias") == is_bias]
            if chosen:
                own = {key: [group[key][n] for n in chosen] for key in ("params", "param_names")}
                groups.append({**group, **own, "is_bias": is_bias})
    return groups


def build(settings: Settings, parameters: Parameters) -> Optimizer:
    """Return the optimizer over `parameters`. Raises ConfigError for a second warm-up."""
    if settings.warmup_steps:
        raise ConfigError("optimizer.warmup_steps: sgd_warmup has a warm-up of its own; set optimizer.warmup instead")
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
    return optimizer
