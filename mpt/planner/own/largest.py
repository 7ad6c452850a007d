"""Results whose shape depends on values, as large as they can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpt.planner.device.operator_kinds import is_known
from mpt.planner.own.known_values import MASKS


def has_masks(indices: Sequence[Tensor | None]) -> bool:
    return any(
        index is not None and index.dtype in MASKS and not is_known(index) for index in indices
    )


def most_places(tensor: Tensor) -> Tensor:
    """Return the places of all of a tensor's elements: (elements, dimensions)."""
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def most_different(tensor: Tensor, *options: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return as many different elements as there are elements, their inverse and their counts."""
    count = tensor.numel()
    inverse = tensor.new_empty(tensor.shape, dtype=torch.int64)
    return tensor.new_empty(count), inverse, tensor.new_empty(count, dtype=torch.int64)


def all_boxes(boxes: Tensor, *options: Any) -> Tensor:
    """Return the places of all boxes, of which a non-maximum suppression may keep each."""
    return boxes.new_empty(len(boxes), dtype=torch.int64)


def most_slices(
    tensor: Tensor, dim: int, *options: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return as many different slices as there are, their inverse and their counts."""
    inverse, counts = (tensor.new_empty(tensor.shape[dim], dtype=torch.int64) for _ in range(2))
    return tensor.new_empty(tensor.shape), inverse, counts


def without_masks(
    indices: Sequence[Tensor | None], places: Callable[[Tensor], Tensor]
) -> list[Tensor | None]:
    """Return indices with each mask as the places that it selects, as torch takes it apart."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in MASKS:
            found.append(index)
        else:
            found += places(index).unbind(1)
    return found
