"""Adamax: Adam with the infinity norm in place of the second moment (Kingma & Ba, 2015, section 7.1)."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.optim.shared.groups import Parameters

SHARDED = True


class Settings(OptimizerOptions):
    lr: float = Field(2e-3, gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    """Decay rates of the running means of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of the update, against division by zero."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay, added to the gradient (L2)."""
    foreach: bool | None = None
    """One kernel over many tensors: faster, with a copy of the parameters' size at its peak. null lets torch choose."""


def build(settings: Settings, parameters: Parameters) -> Optimizer:
    """Return the optimizer over `parameters`, a list of parameters or of parameter groups."""
    return torch.optim.Adamax(
        parameters,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        foreach=settings.foreach,
    )
