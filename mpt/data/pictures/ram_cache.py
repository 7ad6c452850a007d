"""Decoded samples of one split, kept in memory from the first time they are read.

A training and its workers share one copy: with workers it lies in shared memory, which they fill together. Two that
decode the same sample at the same time write the same bytes. A data set that does not fit is refused before training.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mpt.errors import DataError

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
SHARE_OF_FREE = 0.8
"""How much of the free memory the samples may take."""


class RamCache:
    """Room for `count` uint8 samples of one shape. Raises DataError if they would not fit."""

    def __init__(self, count: int, shape: tuple[int, ...], limit_gib: float, shared: bool) -> None:
        size = count * math.prod(shape)
        needed = (
            f"dataset.cache=ram: {count} decoded samples of {' x '.join(map(str, shape))} "
            f"take {size / GIB:.3g} GiB"
        )
        if size > limit_gib * GIB:
            raise DataError(
                f"{needed}, more than dataset.cache_gib={limit_gib:g}; raise that if the machine has the memory, or "
                "leave the cache out"
            )
        free = free_bytes(shared)
        if free is not None and size > SHARE_OF_FREE * free:
            where = f"shared memory ({SHARED_MEMORY})" if shared else "memory"
            raise DataError(
                f"{needed}, and {free / GIB:.3g} GiB of {where} are free; leave the cache out"
            )
        self.samples, self.filled = (room(total, shared) for total in (size, count))
        self.samples = self.samples.view(count, *shape)
        self.filled.zero_()

    def get(self, index: int, read: Callable[[], Tensor]) -> Tensor:
        """Return a sample, read if it is not there yet. It is not to be changed in place."""
        if not self.filled[index]:
            self.samples[index] = read()
            self.filled[index] = 1
        return self.samples[index]


def room(size: int, shared: bool) -> Tensor:
    """Return that many bytes, which no page is given to before it is written; shared ones all processes see."""
    if not shared:
        return torch.empty(size, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def free_bytes(shared: bool) -> int | None:
    """Return how much memory is free, and in the folder of shared memory if it is to lie there; None if unknown."""
    found: int | None = None
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        found = (
            int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
        )
    if shared and SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        found = free if found is None else min(found, free)
    return found
