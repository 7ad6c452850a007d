"""AdamW without a schedule: no rate has to fall, because an average over the steps is evaluated.

Three sequences: z takes AdamW's steps, x is the weighted mean of the z so far, and gradients are taken at
y = beta1 x + (1 - beta1) z. A parameter holds y and the state z; x follows from both, so it costs AdamW's memory.
Evaluations, previews, samples, exports and the modules of checkpoints have x. The rate may be 1 to 10 times AdamW's.
A weight counts by the square of its step's rate, so a warm-up is forgotten.

BatchNorm's running statistics are those of y, about which a run warns. A moving average of the task's own follows y.
With `weight_decay` the decay is taken at y. Source: Defazio et al., "The road less scheduled", 2024, algorithm 1 and
section 4; the arithmetic is that of its authors' `schedulefree.AdamWScheduleFree`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.optim.shared.averaging import AveragingOptimizer
from mpt.optim.shared.groups import Parameters
from mpt.optim.shared.own_update import OwnUpdate


class Settings(OptimizerOptions):
    lr: float = Field(2.5e-3, gt=0)
    schedule: Literal["constant"] = "constant"
    """None: the average takes its place. `warmup_steps` is of use."""
    betas: tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    """How near to the average gradients are taken, and the decay rate of the mean of their squares."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of the update, against division by zero."""
    weight_decay: float = Field(0.0, ge=0)
    """Taken from the weights, times the rate."""
    r: float = Field(0.0, ge=0)
    """Power of the step's number by which it counts in the average; 0 counts all alike."""
    weight_lr_power: float = Field(2.0, ge=0)
    """Power of the largest rate so far by which a step counts in the average."""
    foreach: bool | None = None
    """One kernel over many tensors: faster, with two copies of the parameters' size at its peak. null: on a GPU."""


class ScheduleFreeAdamW(OwnUpdate, AveragingOptimizer):
    """Parameters are y; state `z` and `exp_avg_sq`; groups count `k`, `weight_sum` and `lr_max`."""

    elementwise = True

    def __init__(self, parameters: Parameters, foreach: bool | None, **defaults: Any) -> None:
        super().__init__(
            parameters, {**defaults, "foreach": foreach, "k": 0, "weight_sum": 0.0, "lr_max": 0.0}
        )

    def update(self) -> None:
        """Perform one update."""
        for group in self.param_groups:
            share = count_step(group)
            members = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in members:
                state = self.state[parameter]
                if "z" not in state:
                    state["z"] = parameter.detach().clone(memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(
                        parameter, memory_format=torch.preserve_format
                    )
            together = (
                members[0].is_cuda if group["foreach"] is None and members else group["foreach"]
            )
            for some in (
                [members] if together and members else [[parameter] for parameter in members]
            ):
                self._update(some, group, share)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any], share: float) -> None:
        """Step some parameters whose step counts for `share` of the average."""
        first, second = group["betas"]
        weights: list[Tensor] = [*parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        squares: list[Tensor] = [self.state[parameter]["exp_avg_sq"] for parameter in parameters]
        z: list[Tensor] = [self.state[parameter]["z"] for parameter in parameters]
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        divisors = torch._foreach_div(squares, 1 - second ** group["k"])
        torch._foreach_sqrt_(divisors)
        torch._foreach_add_(divisors, group["eps"])
        updates = torch._foreach_div(gradients, divisors)
        del divisors
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        torch._foreach_lerp_(weights, z, share)
        torch._foreach_add_(weights, updates, alpha=group["lr"] * (first * (1 - share) - 1))
        torch._foreach_sub_(z, updates, alpha=group["lr"])

    def average(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor | None:
        """Return x, from y and z."""
        if "z" not in self.state.get(parameter, {}):
            return None
        z: Tensor = self.state[parameter]["z"]
        return parameter.detach().float().lerp(z.float(), 1 - 1 / group["betas"][0])


def count_step(group: dict[str, Any]) -> float:
    """Count a step of a group, and return its share of the average."""
    group["k"] += 1
    group["lr_max"] = max(group["lr"], group["lr_max"])
    weight = group["k"] ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
    group["weight_sum"] += weight
    return weight / group["weight_sum"] if group["weight_sum"] else 0.0


def build(settings: Settings, parameters: Parameters) -> Optimizer:
    """Return the optimizer over `parameters`, a list of parameters or of parameter groups."""
    return ScheduleFreeAdamW(
        parameters,
        settings.foreach,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        r=settings.r,
        weight_lr_power=settings.weight_lr_power,
    )
