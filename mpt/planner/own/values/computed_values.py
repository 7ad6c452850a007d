"""All values of a step, computed on the host alongside the fake tensors: for steps whose course follows from values.

A solver that chooses the size of its steps calls its network as often as its values say. So the weights are drawn, the
passes computed and the weights updated in plain PyTorch on the CPU, and what is read is true. It takes the time of two
real steps on a CPU, and their memory, so both have a limit.
"""

from __future__ import annotations

import time
from math import inf
from typing import Any

from torch import Tensor

from mpt.planner.own.values.known_values import TrueValues
from mpt.planner.trace.cannot_plan import CannotPlan

MOST_HELD_BYTES = 4 << 30


class TooMuch(CannotPlan):
    """All values take too long to compute, or too much of the host's memory."""


class ComputedValues(TrueValues):
    """The values of all storages."""

    most_filled = MOST_HELD_BYTES

    def __init__(self, most_seconds: float) -> None:
        super().__init__(are_trusted=True)
        self.most_seconds = most_seconds
        self.most_bytes = self.most_data_bytes = MOST_HELD_BYTES
        self._sizes: dict[int, int] = {}
        self._held = 0
        self._seconds = 0.0
        self._data_seconds = inf

    def computed(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any = None) -> Any:
        """Return an operator's result on the values of its arguments. Raises TooMuch if it all takes too long."""
        started = time.perf_counter()
        try:
            return super().computed(func, args, kwargs, result)
        finally:
            self._seconds += time.perf_counter() - started
            if self._seconds > self.most_seconds:
                raise TooMuch(
                    f"cannot plan: its values take more than {self.most_seconds:.0f} s to compute"
                )

    def keep(self, fake: Tensor, value: Tensor | None) -> None:
        """Note the values of new memory. Raises TooMuch if it is more than the limit."""
        before = self._count
        super().keep(fake, value)
        if self._count > before:
            self._sizes[self._count] = size = fake.untyped_storage().nbytes()
            self._held += size
            if self._held > MOST_HELD_BYTES:
                raise TooMuch(
                    f"cannot plan: its values take more than {MOST_HELD_BYTES >> 30} GiB of the host's memory"
                )

    def _drop(self, number: int) -> None:
        super()._drop(number)
        self._held -= self._sizes.pop(number, 0)
