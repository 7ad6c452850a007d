"""Which storages of tensors live: the one tracker that the measured step and the planner share.

A dispatch mode sees every operator's tensors; a weak reference reports each storage's death. A storage counts once,
however many tensors view it. The meaning of births and deaths (bytes by category, events to replay through an
allocator) is for `mpt.run.process.memory_meter` and `mpt.planner.trace.recorder`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


class _Reference(weakref.ref[Any]):
    """A storage, with its address and its number for when it is gone."""

    __slots__ = ("address", "number")
    address: int
    number: int


class LiveStorages:
    """The storages that live, by numbers of the user's choice: addresses are used again, numbers are not."""

    def __init__(self, on_death: Callable[[int], None]) -> None:
        self.on_death = on_death
        self.numbers: dict[int, int] = {}
        """Address of a storage's C++ object -> its number."""
        self.references: dict[int, _Reference] = {}

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, None if it was never added."""
        return self.numbers.get(tensor.untyped_storage()._cdata)

    def add(self, tensor: Tensor, number: int) -> None:
        """Follow a tensor's storage until its end."""
        self.add_storage(tensor.untyped_storage(), number)

    def add_storage(self, storage: Any, number: int) -> None:
        """Follow a storage until its end."""
        reference = self.references[number] = _Reference(storage, self._end)
        reference.number, reference.address = number, storage._cdata
        self.numbers[reference.address] = number

    def bury(self, tensor: Tensor) -> None:
        """Take a tensor's storage for dead while it lives."""
        self.bury_storage(tensor.untyped_storage())

    def bury_storage(self, storage: Any) -> None:
        """Take a storage for dead whose memory was given back while it lives."""
        address = storage._cdata
        self._bury(self.numbers[address], address)

    def forget(self) -> None:
        """Follow nothing any more, and report no end."""
        self.references.clear()
        self.numbers.clear()

    def _end(self, reference: _Reference) -> None:
        self._bury(reference.number, reference.address)

    def _bury(self, number: int, address: int) -> None:
        self.references.pop(number, None)
        self.numbers.pop(address, None)
        self.on_death(number)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operator's arguments or results, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
