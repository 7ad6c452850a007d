"""Lion: the sign of an interpolated momentum, with one state tensor per weight instead of Adam's two.

Steps are of the size of the rate, so it wants one 3 to 10 times below Adam's and a weight decay that much above.
Source: Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.optim.shared.groups import Parameters
from mpt.optim.shared.own_update import OwnUpdate


class Settings(OptimizerOptions):
    lr: float = Field(1e-4, gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.99,
    )
    """The interpolation that is stepped along, and the decay of the momentum."""
    weight_decay: float = Field(0.0, ge=0)
    """Taken from the weights, times the rate."""


class Lion(OwnUpdate):
    """Algorithm 2 of the paper; state `exp_avg`."""

    elementwise = True
    takes_tensors = True

    def __init__(
        self, parameters: Parameters, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self) -> None:
        """Perform one update."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                if group["weight_decay"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                direction = momentum.lerp(parameter.grad, 1 - first).sign_()
                # of a recorded update, which reads it on the device
                if isinstance(group["lr"], Tensor):
                    parameter.sub_(direction.mul_(group["lr"]))
                else:
                    parameter.add_(direction, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - second)


def build(settings: Settings, parameters: Parameters) -> Optimizer:
    """Return the optimizer over `parameters`, a list of parameters or of parameter groups."""
    return Lion(
        parameters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
    )
