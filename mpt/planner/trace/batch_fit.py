"""One traced step, any batch size: each event's bytes are a + b * batch.

A step asks for the same tensors in the same order whatever the batch, so two traces at different sizes give every
storage's line, and the replay at a third size costs milliseconds. Extrapolating the peak itself would be wrong: what
is rounded up, split and left over does not scale. If the two event lists differ (a loop over micro-batches of a
fixed size), there is no fit and the planner traces again at each size. So it does where a storage would have less than
nothing at a batch of 0: it grows faster than the batch, as the distances of all samples from all others do. The scratch
of sums grows until the card is full (`mpt.planner.trace.reductions`), other scratch may begin with a number of samples:
of these the larger of the two is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpt.planner.trace.reductions import REDUCTIONS
from mpt.planner.trace.trace import Storage, Trace


@dataclass(frozen=True)
class BatchFit:
    """Sizes of a trace's storages as lines over the batch size."""

    trace: Trace
    fixed: tuple[float, ...]
    per_sample: tuple[float, ...]

    def sizes(self, batch_size: int) -> list[int]:
        """Return every storage's bytes at a batch size."""
        return [
            max(0, round(fixed + slope * batch_size))
            for fixed, slope in zip(self.fixed, self.per_sample, strict=True)
        ]


def fit(first: Trace, first_batch: int, second: Trace, second_batch: int) -> BatchFit | None:
    """Return the fit through two traces, or None if their events differ or a storage is on no line."""
    if first.events != second.events or first_batch == second_batch:
        return None
    if any(a.operator != b.operator for a, b in zip(first.storages, second.storages, strict=True)):
        return None
    ends = [
        _ends(a, b.size, second_batch / first_batch)
        for a, b in zip(first.storages, second.storages, strict=True)
    ]
    slopes = [(high - low) / (second_batch - first_batch) for low, high in ends]
    fixed = [low - slope * first_batch for (low, _), slope in zip(ends, slopes, strict=True)]
    if any(round(size) < 0 for size in fixed):
        return None
    return BatchFit(first, tuple(fixed), tuple(slopes))


def _ends(storage: Storage, second: int, times: float) -> tuple[int, int]:
    """Return a storage's sizes at both batches, the larger for scratch that is on no line."""
    grows_faster = second > times * storage.size
    if storage.category == "workspace" and (grows_faster or storage.operator in REDUCTIONS):
        return max(storage.size, second), max(storage.size, second)
    return storage.size, second


def largest_batch(fits: Callable[[int], bool], start: int, limit: int = 2**20) -> int:
    """Return the largest batch size for which `fits` holds, 0 if none; `fits` is taken to be monotonic."""
    low, high = 0, max(1, start)
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
