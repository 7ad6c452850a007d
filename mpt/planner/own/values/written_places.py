"""How many places of a mask can be selected because they were written: a mask of zeros that has ones at some places.

Sparse adapters choose weights by an order that they draw (`mask.scatter_(1, randperm(n)[:k], True)`) and ask for their
places. Masks as large as a layer's weight are not followed by value; how many places were written to says enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mpt.planner.own.values.by_memory import ByMemory
from mpt.planner.own.values.known_values import MASKS, traits_of
from mpt.run.process.storage_trace import tensors_in

_aten = torch.ops.aten
ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
SCATTERED = {
    _aten.scatter.src,
    _aten.scatter.value,
    _aten.scatter_.src,
    _aten.scatter_.value,
}
INDEXED = {_aten.index_put.default, _aten.index_put_.default}
OVERWRITTEN = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.copy_.default}
WRITING = SCATTERED | INDEXED | OVERWRITTEN
PASSING = {_aten.clone.default, _aten._to_copy.default}
"""Operators whose results are 0 where their first argument is."""
COMPARING = {
    _aten.eq.Scalar: lambda number: number != 0,
    _aten.ne.Scalar: lambda number: number == 0,
    _aten.gt.Scalar: lambda number: number >= 0,
}
"""Comparison with a number -> whether it is false for 0."""


class WrittenPlaces:
    """How many places of tensors can have another number than 0."""

    def __init__(self) -> None:
        self._most: ByMemory[int] = ByMemory()

    def most(self, mask: Tensor) -> int | None:
        """Return how many places can be selected; None if they were not written one by one."""
        count = self._most.of(mask)
        return None if not count or count >= mask.numel() else count

    def follow(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Note how many places an operator's result can have."""
        if func in ZEROS:
            if is_plain(result):
                self._most.keep(result, 0)
        elif self._most:
            is_made = bool(args) and is_plain(args[0]) and is_plain(result)
            source = self._most.of(args[0]) if is_made else None
            written = None if source is None else written_by(func, args)
            for place, _ in traits_of(func).writes:
                for one in filter(is_plain, tensors_in(args[place : place + 1])):
                    self._most.drop(one)
            if source is not None and written is not None:
                self._most.keep(result, source + written)


def is_plain(value: Any) -> bool:
    """Return whether a value is a fake tensor that has memory of its own."""
    return type(value) is FakeTensor and value.layout is torch.strided


def written_by(func: Any, args: Sequence[Any]) -> int | None:
    """Return how many places an operator writes to; None if others are no longer 0."""
    if func in PASSING:
        return 0
    if func in COMPARING:
        return 0 if COMPARING[func](args[1]) else None
    if func in SCATTERED:
        return int(args[2].numel())
    if func in OVERWRITTEN:
        return int(args[0].numel())
    if func in INDEXED and not any(one is not None and one.dtype in MASKS for one in args[1]):
        indices = [one for one in args[1] if one is not None]
        shapes: torch.Size = torch.broadcast_shapes(*(one.shape for one in indices))  # type: ignore[no-untyped-call]
        others = [
            size
            for place, size in enumerate(args[0].shape)
            if place >= len(args[1]) or args[1][place] is None
        ]
        return int(math.prod((*shapes, *others)))
    return None
