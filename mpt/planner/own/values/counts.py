"""Counts whose total is known though no value is: the tokens of each expert, the samples of each class.

A router counts what it chose, and reads the counts to share tokens out: `bincount`, `histc`, or ones that are scattered
into zeros and summed. Were they all 0, each expert would be left out. They are taken to be as even as they can be, so
that all experts together get what there is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from mpt.planner.own.values.by_memory import ByMemory

MOST_COUNTS = 4096
"""Of one tensor whose counts are known."""
ALL = -1
"""The total of a tensor of ones: they may be added at places."""
_aten = torch.ops.aten
COUNTING = {_aten.bincount.default, _aten.histc.default}
"""They count the elements of their first argument."""
ONES = {_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default}
SCATTERING = {_aten.scatter.value, _aten.scatter_.value}
"""They write one number to places; one-hot vectors are made so."""
ADDING = {
    **dict.fromkeys((_aten.scatter_add.default, _aten.scatter_add_.default), 3),
    **dict.fromkeys((_aten.index_add.default, _aten.index_add_.default), 3),
}
"""They add at places -> the argument that they add."""
PASSING = {_aten.clone.default, _aten._to_copy.default}
SUMS = {_aten.sum.default, _aten.sum.dim_IntList}
OPERATORS = {*COUNTING, *ONES, *SCATTERING, *ADDING, *PASSING, *SUMS}


class Totals:
    """How many ones tensors have in all that are made of zeros and ones."""

    def __init__(self) -> None:
        self.evened = 0
        """How many tensors of counts were taken to be even."""
        self.may_be_read = False
        """A value that is known was read since there were some."""
        self._of: ByMemory[int] = ByMemory()

    def counts(self, func: Any, args: Any, result: Tensor) -> Tensor | None:
        """Follow one of `OPERATORS`; return the values of its result if it counts."""
        total = self._total(func, args)
        if total is None or not result.numel():
            return None
        if func in (*COUNTING, *ADDING, *SUMS) and result.numel() <= MOST_COUNTS:
            self.evened += 1
            return even(total, result)
        self._of.keep(result, total)
        return None

    def note_read(self) -> None:
        """Note that a value was read that may be one of these counts, or follow from one."""
        self.may_be_read |= self.evened > 0

    def notes(self) -> list[str]:
        """Return the plan's assumptions."""
        words = "tensors of counts, such as the tokens of each expert, were taken to be even"
        return [f"{self.evened} {words}"] if self.may_be_read else []

    def _total(self, func: Any, args: Any) -> int | None:
        if func in COUNTING:
            is_weighted = func is _aten.bincount.default and len(args) > 1 and args[1] is not None
            return None if is_weighted else args[0].numel()
        if func in ONES:
            return ALL
        if func in SCATTERING:
            return args[2].numel() if args[3] == 1 else None
        source = args[ADDING.get(func, 0)]
        total = self._of.of(source) if isinstance(source, Tensor) else None
        if total != ALL:
            return total
        return source.numel() if func in ADDING else None  # a sum's gradient is ones too


def even(total: int, like: Tensor) -> Tensor:
    """Return counts of the shape and dtype of a tensor, with this sum."""
    each, more = divmod(total, like.numel())
    with torch._C.DisableTorchFunction(), no_dispatch():
        counts = torch.full((like.numel(),), each, dtype=like.dtype, device="cpu")
        counts[:more] += 1
        return counts.view(like.shape)
