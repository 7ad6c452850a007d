"""Pinned host memory as torch keeps it: every block rounded up to a power of two, and none returned before the end.

Source: CachingHostAllocator.h (`PowerOf2Ceil`, one free list for each size). So a process holds, for each size,
the most blocks that were in use at once.
"""

from __future__ import annotations

from collections import Counter


def block_bytes(size: int) -> int:
    """Return the bytes of the pinned block that holds `size` bytes."""
    return 1 << (size - 1).bit_length() if size else 0


class HostBlocks:
    """Counts the pinned blocks of one holder, so that a plan can count them."""

    def __init__(self) -> None:
        self.in_use: Counter[int] = Counter()
        self.most: Counter[int] = Counter()

    def take(self, size: int) -> None:
        """Count a block that is now in use."""
        block = block_bytes(size)
        self.in_use[block] += 1
        self.most[block] = max(self.most[block], self.in_use[block])

    def give_back(self, size: int) -> None:
        """Count a block that may be used again."""
        self.in_use[block_bytes(size)] -= 1

    @property
    def bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(size * count for size, count in self.most.items())
