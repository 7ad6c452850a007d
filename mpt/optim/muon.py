"""Muon: momentum made orthogonal, for hidden matrices; AdamW for everything else, in one optimizer.

Hidden matrices are the weights of two and more dimensions but embeddings, the first layer and the last; a convolution's
kernel counts as a matrix of its output channels. `adam` names more that AdamW is to update. Muon keeps one tensor of
state per weight. With `adjust: match_rms_adamw` both parts can share AdamW's rate.

The orthogonalisation is torch's (`torch.optim.Muon`, which takes matrices alone). Sources: Jordan et al., "Muon: an
optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is scalable for LLM training", 2025 (the rate).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import _muon as torch_muon

from mpt.config.options import OptimizerOptions
from mpt.optim.shared.groups import Parameters
from mpt.optim.shared.own_update import OwnUpdate

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Settings(OptimizerOptions):
    splits_matrices: ClassVar[bool] = True

    momentum: float = Field(0.95, ge=0, lt=1)
    """Momentum factor of the matrices."""
    nesterov: bool = True
    """Use Nesterov momentum for the matrices."""
    weight_decay: float = Field(0.0, ge=0)
    """Taken from the weights, times the rate, of either part."""
    ns_steps: int = Field(5, ge=1, le=20)
    """Newton-Schulz iterations."""
    adjust: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """How a matrix's sides scale its rate."""
    adam: list[str] = Field(default_factory=list)
    """Globs over dotted parameter names ("net.head.*") that AdamW updates too."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    """AdamW's."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's."""


class MuonWithAdam(OwnUpdate):
    """Groups with `muon` set are stepped by Muon (state `momentum_buffer`), the others by torch's AdamW."""

    def __init__(self, parameters: Parameters, **defaults: Any) -> None:
        adam = torch.optim.AdamW([torch.zeros(())]).defaults
        super().__init__(parameters, {**adam, "muon": False, **defaults})
        self.adam = torch.optim.AdamW([torch.zeros(())])

    def update(self) -> None:
        """Perform one update."""
        for group in self.param_groups:
            if group["muon"]:
                self._step_matrices(group)
        self.adam.param_groups = [group for group in self.param_groups if not group["muon"]]
        self.adam.state = self.state
        self.adam.step()

    def _step_matrices(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momentum: Tensor = state["momentum_buffer"]
            momentum.lerp_(parameter.grad, 1 - group["momentum"])
            update = (
                parameter.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            )
            step_matrix(parameter, update, group)


def step_matrix(parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
    """Decay a matrix and move it by its update made orthogonal."""
    flat = torch_muon._zeropower_via_newtonschulz(
        update.flatten(1), COEFFICIENTS, group["ns_steps"], 1e-7
    )
    rate = torch_muon._adjust_lr(group["lr"], group["adjust"], flat.shape)
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(flat.view(update.shape).to(parameter.dtype), alpha=-rate)


def build(settings: Settings, parameters: Parameters) -> Optimizer:
    """Return the optimizer over `parameters`, a list of parameters or of parameter groups."""
    return MuonWithAdam(
        parameters,
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
        ns_steps=settings.ns_steps,
        adjust=settings.adjust,
        betas=settings.betas,
        eps=settings.eps,
    )
