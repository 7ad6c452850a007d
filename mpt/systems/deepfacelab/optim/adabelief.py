"""AdaBelief as DeepFaceLab has it: no bias correction, the new mean in the variance, epsilon 1e-6 outside the root.

m = 0.9 m + 0.1 g; v = 0.999 v + 0.001 (g - m)^2; step = -lr m / (sqrt(v) + 1e-6). The published AdaBelief (Zhuang et
al. 2020) and the package of that name correct the bias and add epsilon elsewhere. `lr_dropout` 0.3 with `lr_cos` 500 is
DeepFaceLab's "lr dropout"; clipping by global norm is `clip_grad_norm: 1`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.optim.shared.groups import Parameters
from mpt.systems.deepfacelab.optim.shared.leras import LerasOptimizer, resolution


class Settings(OptimizerOptions):
    lr: float = Field(5e-5, gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    """Decay rates of the running means of the gradient and of its square."""
    lr_dropout: float = Field(1.0, gt=0, le=1)
    """The chance of a weight to be updated in a step."""
    lr_cos: int = Field(0, ge=0)
    """Period, in updates, of a cosine between the full rate and zero; 0 for none."""


class AdaBelief(LerasOptimizer):
    """DeepFaceLab's AdaBelief; state `ms` and `vs`."""

    state_names = ("ms", "vs")

    def change(
        self, group: dict[str, Any], gradient: Tensor, state: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        mean, variance = state
        mean.mul_(group["beta1"]).add_(gradient, alpha=1 - group["beta1"])
        surprise = gradient - mean
        variance.mul_(group["beta2"]).addcmul_(surprise, surprise, value=1 - group["beta2"])
        del surprise
        return mean, variance.sqrt().add_(resolution(variance.dtype))


def build(settings: Settings, parameters: Parameters) -> Optimizer:
    """Return the optimizer over `parameters`, a list of parameters or of parameter groups."""
    return AdaBelief(
        parameters,
        lr=settings.lr,
        lr_dropout=settings.lr_dropout,
        lr_cos=settings.lr_cos,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
    )
