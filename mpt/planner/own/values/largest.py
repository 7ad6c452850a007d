"""Results whose shape depends on values, as large as they can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mpt.planner.device.operator_kinds import is_known
from mpt.planner.own.stand_ins.sequences import alignments_gradient, counted, most_alignments
from mpt.planner.own.values.by_memory import ByMemory
from mpt.planner.own.values.known_values import MASKS
from mpt.run.process.storage_trace import tensors_in

_aten = torch.ops.aten


def along(args: Sequence[Any]) -> int:
    """Return how many places there are along the dimension that an operator was given, all if none."""
    dim = args[1] if len(args) > 1 else None
    count: int = args[0].numel() if dim is None or not args[0].dim() else args[0].shape[dim]
    return count


CHOICES: dict[Any, Callable[[Sequence[Any]], int]] = {
    **dict.fromkeys((_aten.argmax.default, _aten.argmin.default), along),
    **dict.fromkeys((_aten.max.dim, _aten.min.dim), along),
    _aten.topk.default: lambda args: along((args[0], args[2] if len(args) > 2 else -1)),
    **dict.fromkeys((_aten.randint.default, _aten.randint.generator), lambda args: args[0]),
    **dict.fromkeys((_aten.randint.low, _aten.randint.low_generator), lambda args: args[1] - args[0]),
}  # fmt: skip
"""Operator that chooses places or numbers -> how many different ones there can be."""
COPIES = {
    _aten._to_copy.default,
    _aten.clone.default,
    _aten.gather.default,
    _aten.index.Tensor,
    _aten.index_select.default,
    _aten.masked_select.default,
}
"""Operators whose results have no other numbers than their first argument."""


class DifferentNumbers:
    """How many different numbers integers can have that were chosen among a few, such as predicted labels."""

    def __init__(self) -> None:
        self._most: ByMemory[int] = ByMemory()

    def follow(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Note how many different numbers an operator's result can have."""
        count = CHOICES.get(func)
        if count is not None:
            self._most.keep(result[1] if isinstance(result, tuple) else result, count(args))
        elif self._most and func in COPIES and (most := self.most(args[0])) is not None:
            self._most.keep(result, most)

    def most(self, tensor: Any) -> int | None:
        """Return how many different numbers a tensor can have, None if that is not known, as of a plain number."""
        return self._most.of(tensor) if isinstance(tensor, Tensor) else None


SELECTIONS = {_aten.gather.default, _aten.index.Tensor, _aten.index_select.default}
"""Operators whose results are as long as their indices."""


class ResultsAtBound:
    """How large the results at their bounds are, and what is selected by them: samples, not only their places."""

    def __init__(self) -> None:
        self.count = 0
        self.largest_bytes = 0
        self.are_listed = False
        """The numbers of one were read all together: samples may be taken by them, one by one."""
        self._places: ByMemory[bool] = ByMemory()

    def note(self, result: Any) -> None:
        """Note a result at its bound."""
        self.count += 1
        for one in tensors_in(result):
            self._places.keep(one, True)
            self._measure(one)

    def read(self, tensor: Tensor) -> None:
        """Note that all numbers of a tensor are read."""
        self.are_listed |= bool(self._places.of(tensor))

    def follow(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Note an operator's result if it is selected by results at their bounds."""
        if self._places and func in SELECTIONS and any(map(self._places.of, tensors_in(args[1:]))):
            self._measure(result)

    def _measure(self, result: Tensor) -> None:
        self.largest_bytes = max(self.largest_bytes, result.numel() * result.itemsize)


def has_masks(indices: Sequence[Tensor | None]) -> bool:
    return any(
        index is not None and index.dtype in MASKS and not is_known(index) for index in indices
    )


FILLED = {_aten.full.default, _aten.ones.default, _aten.zeros.default}


def is_filled_mask(func: Any, result: Any) -> bool:
    """Return whether an operator made a mask that is the same everywhere: a loop ends by it, however long its data."""
    return func in FILLED and result.dtype == torch.bool


def is_place(value: Any) -> bool:
    """Return whether this is one integer that is not known, which is 0: the end of a slice that starts there is not."""
    is_fake = type(value) is FakeTensor and value.numel() == 1
    return is_fake and value.dtype in (torch.int32, torch.int64) and not is_known(value)


def most_places(tensor: Tensor) -> Tensor:
    """Return the places of all of a tensor's elements: (elements, dimensions)."""
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def most_different(
    tensor: Tensor, *options: Any, most: int | None = None, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return as many different elements as there are elements, or `most`, their inverse and their counts."""
    count = tensor.numel() if most is None else min(tensor.numel(), most)
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


def least_squares(
    factors: Tensor, sums: Tensor, *options: Any, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return solutions, residuals, ranks and singular values, as if no matrix lacked a rank.

    The solutions lie in a copy of `sums`, by columns. A kernel on a card has a copy of the factors too.
    """
    rows, columns = factors.shape[-2:]
    batch, is_on_cpu = factors.shape[:-2], factors.device.type == "cpu"
    driver = driver or ("gelsy" if is_on_cpu else "gels")
    is_vector = sums.dim() == 1 or sums.shape == factors.shape[:-1]
    count = () if is_vector else sums.shape[-1:]
    if not is_on_cpu:
        torch.empty_like(factors)
    found = sums.new_empty((*batch, *count, max(rows, columns)))[..., :columns]
    has_values, none = driver in ("gelsd", "gelss"), (0,)
    return (
        found if is_vector else found.transpose(-2, -1),
        sums.new_empty((*batch, *count) if rows > columns and driver != "gelsy" else none),
        sums.new_empty(none if driver == "gels" else batch, dtype=torch.int64),
        sums.new_empty((*batch, min(rows, columns)) if has_values else none),
    )


BOUNDS: dict[Any, Callable[..., Any]] = {
    _aten.unique_consecutive.default: most_different,
    _aten.unique_dim.default: most_slices,
    _aten.unique_dim_consecutive.default: most_slices,
    _aten._ctc_loss.Tensor: most_alignments,
    _aten._ctc_loss_backward.Tensor: alignments_gradient,
    _aten.bincount.default: counted,
}
"""Operator -> the function that returns its results at their bound."""
