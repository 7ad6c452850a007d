"""Adam, and AdamW, whose weight decay does not pass through the gradient.

GANs want `betas: [0.5, 0.999]` (Radford et al., 2016) or `[0.0, 0.99]` (Karras et al., 2018). Sources: Kingma & Ba,
"Adam: A Method for Stochastic Optimization", 2015; Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field, model_validator
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.optim.shared.groups import Parameters

NAMES = {"adam": {}, "adamw": {"decoupled": True, "weight_decay": 0.01}}
ABOUT = {
    "adam": "Adam: steps by running means of the gradient and of its square (Kingma and Ba, 2015).",
    "adamw": "Adam with weight decay apart from the gradient (Loshchilov and Hutter, 2019).",
}
SHARDED = True


class Settings(OptimizerOptions):
    gains_by_fusing: ClassVar[bool] = True

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    """Decay rates of the running means of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of the update, against division by zero."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay; `decoupled` says how it is applied."""
    decoupled: bool = False
    """Take the decay from the weights (AdamW) instead of adding it to the gradient (L2)."""
    amsgrad: bool = False
    """Use the AMSGrad variant: divide by the largest second moment so far."""
    foreach: bool | None = None
    """One kernel over many tensors: faster, with a copy of the parameters' size at its peak. null lets torch choose."""
    fused: bool | None = None
    """Use torch's fused kernel for the update. null lets torch choose."""

    @model_validator(mode="after")
    def check_kernels(self) -> Settings:
        if self.fused and self.foreach:
            raise ValueError("fused and foreach are two kernels of one update; set one of them")
        return self


def build(settings: Settings, parameters: Parameters) -> Optimizer:
    """Return the optimizer over `parameters`, a list of parameters or of parameter groups."""
    kind = torch.optim.AdamW if settings.decoupled else torch.optim.Adam
    return kind(
        parameters,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        amsgrad=settings.amsgrad,
        foreach=settings.foreach,
        fused=settings.fused,
    )
