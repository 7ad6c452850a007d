"""RMSprop as DeepFaceLab has it: rho 0.9 and epsilon 1e-6 outside the root; no momentum, no centring.

a = 0.9 a + 0.1 g^2; step = -lr g / (sqrt(a) + 1e-6). `lr_dropout` and `lr_cos` are those of `adabelief`.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.optim.shared.groups import Parameters
from mpt.systems.deepfacelab.optim.shared.leras import LerasOptimizer, resolution


class Settings(OptimizerOptions):
    lr: float = Field(5e-5, gt=0)
    rho: float = Field(0.9, ge=0, lt=1)
    """Decay rate of the running mean square."""
    lr_dropout: float = Field(1.0, gt=0, le=1)
    """The chance of a weight to be updated in a step."""
    lr_cos: int = Field(0, ge=0)
    """Period, in updates, of a cosine between the full rate and zero; 0 for none."""


class LerasRMSprop(LerasOptimizer):
    """DeepFaceLab's RMSprop; state `acc`."""

    state_names = ("acc",)

    def change(
        self, group: dict[str, Any], gradient: Tensor, state: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        (average,) = state
        average.mul_(group["rho"]).addcmul_(gradient, gradient, value=1 - group["rho"])
        return gradient, average.sqrt().add_(resolution(average.dtype))


def build(settings: Settings, parameters: Parameters) -> Optimizer:
    """Return the optimizer over `parameters`, a list of parameters or of parameter groups."""
    return LerasRMSprop(
        parameters,
        lr=settings.lr,
        lr_dropout=settings.lr_dropout,
        lr_cos=settings.lr_cos,
        rho=settings.rho,
    )
