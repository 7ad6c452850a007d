"""The common part of DeepFaceLab's two optimizers: a loop in bounded memory, a cosine over updates, and lr_dropout.

`iterations` counts updates in the parameter group, so it is saved with it and needs no tensor to be read. Tensors are
worked through in pieces, since SAEHD's first dense layer alone holds two thirds of the weights: the temporaries of a
step are one piece, not a copy of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mpt.optim.shared.groups import Parameters
from mpt.optim.shared.own_update import OwnUpdate

PIECE = 2**23
"""Elements worked on at a time: 32 MiB in float32."""


class LerasOptimizer(OwnUpdate):
    """An optimizer whose subclass says which tensors of state a parameter has and how one piece is updated."""

    elementwise = True
    takes_tensors = True
    state_names: tuple[str, ...] = ()

    def __init__(
        self, parameters: Parameters, lr: float, lr_dropout: float, lr_cos: int, **defaults: float
    ) -> None:
        super().__init__(
            parameters,
            {"lr": lr, "lr_dropout": lr_dropout, "lr_cos": lr_cos, "iterations": 0, **defaults},
        )

    def change(
        self, group: dict[str, Any], gradient: Tensor, state: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Update the state in place and return numerator and denominator (a fresh tensor) of the step."""
        raise NotImplementedError

    def update(self) -> None:
        """Perform one update."""
        for group in self.param_groups:
            group["iterations"] += 1
            rate = group["lr"]
            if group["lr_cos"]:
                rate = (
                    rate * (math.cos(2 * math.pi * group["iterations"] / group["lr_cos"]) + 1) / 2
                )
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for name in self.state_names:
                    if name not in state:
                        state[name] = torch.zeros_like(parameter)
                tensors = [parameter, parameter.grad, *(state[name] for name in self.state_names)]
                for piece, gradient, *pieces in pieces_of(tensors):
                    numerator, denominator = self.change(group, gradient, pieces)
                    if group["lr_dropout"] < 1:
                        # A weight that is not drawn stays unchanged; its state is updated all the same.
                        kept = torch.empty_like(denominator).bernoulli_(group["lr_dropout"])
                        numerator = numerator * kept
                    # of a recorded update, which reads it on the device
                    if isinstance(rate, Tensor):
                        piece.sub_(denominator.reciprocal_().mul_(numerator).mul_(rate))
                    else:
                        piece.addcdiv_(numerator, denominator, value=-rate)


def pieces_of(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield matching views of at most `PIECE` elements; tensors that do not share a plain layout are yielded whole."""
    if tensors[0].numel() <= PIECE or not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    flat = [tensor.view(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), PIECE):
        yield [tensor[start : start + PIECE] for tensor in flat]


def resolution(dtype: torch.dtype) -> float:
    """Return the decimal resolution of a dtype (1e-6 for float32), which DeepFaceLab uses for epsilon.

    bfloat16 has float32's range, and takes its epsilon: its own, 0.01, is larger than most roots of mean squares.
    float16 keeps 0.001, for smaller squares are 0 there.
    """
    return float(torch.finfo(torch.float32 if dtype == torch.bfloat16 else dtype).resolution)
