"""Stochastic gradient descent, with momentum unless it is set to 0."""

from __future__ import annotations

import torch
from pydantic import Field, model_validator
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.optim.shared.groups import Parameters

SHARDED = True


class Settings(OptimizerOptions):
    lr: float = Field(0.1, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum factor; 0 is none."""
    dampening: float = Field(0.0, ge=0, le=1)
    """Share of the gradient that is left out of the momentum."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay, added to the gradient (L2)."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    foreach: bool | None = None
    """One kernel over many tensors: faster, with a copy of the parameters' size at its peak. null lets torch choose."""
    fused: bool | None = None
    """Use torch's fused kernel for the update. null lets torch choose."""

    @model_validator(mode="after")
    def check_combinations(self) -> Settings:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("nesterov needs momentum above 0 and dampening 0")
        if self.fused and self.foreach:
            raise ValueError("fused and foreach are two kernels of one update; set one of them")
        return self


def build(settings: Settings, parameters: Parameters) -> Optimizer:
    """Return the optimizer over `parameters`, a list of parameters or of parameter groups."""
    return torch.optim.SGD(
        parameters,
        lr=settings.lr,
        momentum=settings.momentum,
        dampening=settings.dampening,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
        foreach=settings.foreach,
        fused=settings.fused,
    )
