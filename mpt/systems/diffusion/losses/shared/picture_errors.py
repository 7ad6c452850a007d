"""The squared error of each picture, whole or under a mask."""

from __future__ import annotations

from torch import Tensor


def squared_errors(answer: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of each picture (b,)."""
    return (answer - target).square().flatten(1).mean(1)


def masked_errors(answer: Tensor, target: Tensor, mask_b1hw: Tensor) -> Tensor:
    """Return the mean squared error of each picture (b,), each place times its mask."""
    return (mask_b1hw * (answer - target).square()).flatten(1).mean(1)
