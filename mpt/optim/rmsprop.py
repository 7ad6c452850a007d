"""RMSprop: gradients divided by a running root mean square (Hinton, lecture notes, 2012). The original WGAN uses it."""

from __future__ import annotations

import torch
from pydantic import Field
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.optim.shared.groups import Parameters

SHARDED = True


class Settings(OptimizerOptions):
    alpha: float = Field(0.99, ge=0, lt=1)
    """Decay rate of the running mean square."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of the update, against division by zero."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum factor; 0 is none."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay, added to the gradient (L2)."""
    centered: bool = False
    """Divide by the standard deviation of the gradient instead of its root mean square."""
    foreach: bool | None = None
    """One kernel over many tensors: faster, with a copy of the parameters' size at its peak. null lets torch choose."""


def build(settings: Settings, parameters: Parameters) -> Optimizer:
    """Return the optimizer over `parameters`, a list of parameters or of parameter groups."""
    return torch.optim.RMSprop(
        parameters,
        lr=settings.lr,
        alpha=settings.alpha,
        eps=settings.eps,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        centered=settings.centered,
        foreach=settings.foreach,
    )
