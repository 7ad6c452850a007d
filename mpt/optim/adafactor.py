"""Adafactor: of a matrix's second moment the row and column means alone, so that its state is nearly nothing.

The arithmetic is that of `torch.optim.Adafactor` (the paper's without momentum, with a rate relative to the weights'
size), which a test compares. Torch's own reads two norms per tensor on the host, a wait for the device each, and can
for that reason not be planned on fake tensors; here they stay on the device. Source: Shazeer & Stern, "Adafactor:
adaptive learning rates with sublinear memory cost", 2018.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.optim.shared.groups import Parameters
from mpt.optim.shared.own_update import OwnUpdate


class Settings(OptimizerOptions):
    lr: float = Field(1e-2, gt=0)
    """The largest step relative to the root mean square of a tensor's weights; later than step 1/lr^2 they shrink."""
    beta2_decay: float = Field(-0.8, lt=0)
    """Exponent of the step with which the second moment's decay goes to 1."""
    d: float = Field(1.0, gt=0)
    """Limit of an update's root mean square."""
    eps2: float = Field(1e-3, gt=0)
    """The least root mean square of a tensor's weights that the step is relative to."""
    weight_decay: float = Field(0.0, ge=0)
    """Taken from the weights, times the rate."""


class Adafactor(OwnUpdate):
    """State `row_var` and `col_var` of matrices, `variance` of vectors, and a count of steps."""

    def __init__(self, parameters: Parameters, **defaults: float) -> None:
        super().__init__(parameters, defaults)

    def update(self) -> None:
        """Perform one update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_on(parameter, parameter.grad, group)

    def _step_on(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["count"] = state.get("count", 0) + 1
        share = state["count"] ** group["beta2_decay"]
        rate = min(group["lr"], state["count"] ** -0.5)
        size = parameter.norm(2).div_(parameter.numel() ** 0.5).clamp_(min=group["eps2"])
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        # Torch's own, but for bfloat16, which has the range of float32: at 1/128 small gradients would make steps that
        # shrink with them and are lost.
        least = torch.finfo(
            torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype
        ).eps
        update = (
            second_moment(gradient, state, share, least)
            .clamp_(min=least * least)
            .rsqrt_()
            .mul_(gradient)
        )
        excess = update.norm(2).div_(update.numel() ** 0.5 * group["d"]).clamp_(min=1.0)
        parameter.sub_(update.mul_(size.mul_(rate).div_(excess)))


def second_moment(gradient: Tensor, state: dict[str, Any], share: float, least: float) -> Tensor:
    """Move the averages of the squared gradient a `share` towards the present; return the estimate, a fresh tensor."""
    if gradient.dim() < 2:
        if "variance" not in state:
            state["variance"] = torch.zeros_like(gradient)
        state["variance"].lerp_(gradient * gradient, share)
        variance: Tensor = state["variance"]
        return variance.clone()
    for name, dim in (("row_var", -1), ("col_var", -2)):
        # The mean of squares, without a tensor of squares.
        mean = torch.norm(gradient, dim=dim, keepdim=True).square_().div_(gradient.size(dim))
        if name not in state:
            state[name] = torch.zeros_like(mean)
        state[name].lerp_(mean, share)
    rows: Tensor = state["row_var"]
    columns: Tensor = state["col_var"]
    return (rows @ columns).div_(rows.mean(dim=-2, keepdim=True).clamp_(min=least))


def build(settings: Settings, parameters: Parameters) -> Optimizer:
    """Return the optimizer over `parameters`, a list of parameters or of parameter groups."""
    names = ("lr", "beta2_decay", "d", "eps2", "weight_decay")
    return Adafactor(parameters, **{name: getattr(settings, name) for name in names})
