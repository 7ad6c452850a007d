"""Something that is known of tensors, kept by their memory: views know it too, and it is gone with the memory."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor

from mpt.run.process.storage_trace import LiveStorages

T = TypeVar("T")


class ByMemory(Generic[T]):
    """A value for the memory of each tensor; the first that is kept stays."""

    def __init__(self) -> None:
        self._values: dict[int, T] = {}
        self._live = LiveStorages(self._drop)
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._values)

    def keep(self, tensor: Tensor, value: T) -> None:
        """Keep a value for as long as a tensor's memory lives."""
        if self.of(tensor) is None:
            self._count += 1
            self._values[self._count] = value
            self._live.add(tensor, self._count)

    def of(self, tensor: Tensor) -> T | None:
        """Return the value of a tensor, None if there is none."""
        number = self._live.number_of(tensor)
        return None if number is None else self._values[number]

    def drop(self, tensor: Tensor) -> None:
        """Keep nothing of a tensor's memory any more."""
        if self.of(tensor) is not None:
            self._live.bury(tensor)

    def _drop(self, number: int) -> None:
        self._values.pop(number, None)
