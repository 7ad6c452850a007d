"""Masks that share places out: `chosen == 3` for each expert in turn, or the columns of `one_hot(chosen)`.

Each may select all places, but all of them together select each place once. If a step asks for all, they are taken to
be even, so that its experts get as many tokens in all as there are. Where it asks for some only, such as the places of
one predicted class, these may be as large as they can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mpt.planner.device.operator_kinds import is_known
from mpt.planner.own.values.by_memory import ByMemory
from mpt.planner.own.values.counts import SCATTERING
from mpt.planner.own.values.largest import COPIES, DifferentNumbers

_aten = torch.ops.aten
EQUAL = {_aten.eq.Scalar, _aten.eq.Tensor}


@dataclass
class Shared:
    """What is shared out by masks."""

    size: int
    """Places of all masks together."""
    asked: dict[Hashable, int] = field(default_factory=dict)
    """Mask that the step asked for -> its places."""

    @property
    def is_whole(self) -> bool:
        return sum(self.asked.values()) >= self.size


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks in one tensor."""

    shared: Shared
    among: int
    """One of so many places is selected."""
    name: Hashable = None
    """The same for masks that are made twice; None if the tensor's own place is its name."""
    covers: int = 1
    """Places that one of its places stands for."""


class SharedMasks:
    """The masks of a step that share something out."""

    def __init__(
        self, numbers: DifferentNumbers, read: Callable[[Tensor], Any], are_even: bool
    ) -> None:
        """`read`: returns known values; `are_even`: masks are not as large as they can be."""
        self.are_even = are_even
        self._numbers = numbers
        self._read = read
        self._all: list[Shared] = []
        self._chosen: ByMemory[dict[Hashable, Shared]] = ByMemory()
        self._masks: ByMemory[Masks] = ByMemory()

    @property
    def are_asked(self) -> bool:
        """Whether the step asked for such a mask."""
        return any(one.asked for one in self._all)

    @property
    def are_whole(self) -> bool:
        """Whether it asked for all masks that share something out, if for any."""
        return all(one.is_whole for one in self._all if one.asked)

    def follow(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Note what the masks in an operator's result share out."""
        if func in SCATTERING and args[3] == 1:
            self._one_hot(args[2], result)
        elif func in EQUAL:
            self._compared(args[0], args[1], result)
        elif self._masks and func is _aten.any.dim:
            masks = self._masks.of(args[0])
            if masks is not None and (each := args[0].numel() // max(1, result.numel())):
                among, name = max(1, masks.among // each), (masks.name, each)
                self._masks.keep(result, Masks(masks.shared, among, name, each * masks.covers))
        elif self._masks and func in COPIES and (masks := self._masks.of(args[0])) is not None:
            is_part = result.numel() != args[0].numel()
            self._masks.keep(result, Masks(masks.shared, masks.among) if is_part else masks)

    def _among(self, chosen: Any) -> int:
        """Return how many numbers a tensor is chosen among, 0 if that is not known."""
        return (self._numbers.most(chosen) or 0) if isinstance(chosen, Tensor) else 0

    def _compared(self, chosen: Any, other: Any, result: Tensor) -> None:
        """Note the mask of one number, or those of a range of numbers."""
        if isinstance(other, Tensor) and not self._among(chosen):
            chosen, other = other, chosen
        among = self._among(chosen)
        if among > 1 and type(other) is int:
            self._masks.keep(result, Masks(self._shared(chosen, among), among, other))
        elif among > 1 and isinstance(other, Tensor) and self._are_all(other, among):
            self._one_hot(chosen, result)

    def _are_all(self, numbers: Tensor, among: int) -> bool:
        """Return whether these are known to be all numbers, each once: others may be equal, such as pairs of labels."""
        values = self._read(numbers)
        return values is not None and len({*values.flat} | {*range(among)}) == values.size

    def _one_hot(self, chosen: Any, result: Tensor) -> None:
        """Note masks of all numbers in one tensor."""
        among = self._among(chosen)
        if among > 1:
            self._all.append(Shared(among * chosen.numel()))
            self._masks.keep(result, Masks(self._all[-1], among))

    def _shared(self, chosen: Tensor, among: int) -> Shared:
        """Return what masks of one number after another share out."""
        self._chosen.keep(chosen, {})
        views = self._chosen.of(chosen)
        assert views is not None
        place = chosen.storage_offset(), chosen.shape
        if place not in views:
            views[place] = Shared(among * chosen.numel())
            self._all.append(views[place])
        return views[place]

    def count(self, mask: Tensor) -> int | None:
        """Return how many places a mask selects that the step asks for; None if it may be any number."""
        masks = None if is_known(mask) else self._masks.of(mask)
        if masks is None:
            return None
        own = masks if masks.name is None else None
        name = masks.name, own, mask.storage_offset(), mask.numel()
        masks.shared.asked[name] = mask.numel() * masks.covers
        return math.ceil(mask.numel() / masks.among) if self.are_even else None

    def notes(self) -> list[str]:
        """Return the plan's assumptions."""
        if not (self.are_even and self.are_asked):
            return []
        return [
            "masks that share places out, such as the tokens of each expert, were taken to be even"
        ]
