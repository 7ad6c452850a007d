"""A model of PyTorch's caching allocator: bytes reserved from the GPU for a given order of requests.

Memory runs out by segments, not by tensors. `CUDACachingAllocator.cpp` rounds requests to 512 bytes, serves those up
to 1 MiB from 2-MiB segments and those below 10 MiB from 20-MiB segments, rounds larger ones to 2 MiB, takes the
smallest free block that fits, splits it and merges neighbours on freeing. At the memory limit it gives unused
segments back and tries once more. With `expandable_segments` there is one growing segment per pool, mapped in pages
of 2 or 20 MiB.

Streams have pools of their own: a block that was freed on one is not given to another. Not modelled: that a block used
on two streams is free only once both are done with it, `max_split_size_mb`, garbage-collection thresholds. What CUDA
graphs use has pools of its own too (`GRAPHS`), which keep their segments for as long as the graphs are there.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

MIB = 2**20
MINIMUM_BLOCK = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_REQUEST = 10 * MIB
SEGMENT_ROUNDING = 2 * MIB
GRAPHS = 2**20
"""In place of a stream's number, beyond those of real ones: requests of recorded CUDA graphs (`PrivatePool`)."""


class OutOfMemory(Exception):
    """The request does not fit even after unused segments were given back."""

    def __init__(self, requested_bytes: int, reserved_bytes: int, capacity_bytes: int) -> None:
        super().__init__(
            f"{requested_bytes} bytes in addition to {reserved_bytes} reserved, of {capacity_bytes}"
        )
        self.requested_bytes = requested_bytes


class Pool(NamedTuple):
    """The memory that serves requests of a kind."""

    stream: int
    small: bool


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of a segment, free or in use; `mapped` is False only for the unbacked rest of an expandable segment."""

    address: int
    size: int
    pool: Pool
    in_use: bool = False
    mapped: bool = True
    previous: Block | None = None
    next: Block | None = None


def round_request(size: int) -> int:
    """Return the bytes that a request of `size` bytes occupies."""
    return max(MINIMUM_BLOCK, -(-size // MINIMUM_BLOCK) * MINIMUM_BLOCK)


def segment_size(rounded: int) -> int:
    """Return the size of the segment that is asked from the driver for a rounded request."""
    if rounded <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if rounded < LARGE_REQUEST:
        return LARGE_SEGMENT
    return -(-rounded // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


class FreeBlocks:
    """Free blocks of one pool ordered by size, then address: the first that fits is the best fit."""

    def __init__(self) -> None:
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[tuple[int, int], Block] = {}

    def add(self, block: Block) -> None:
        """Insert a block."""
        key = (block.size, block.address)
        bisect.insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Take a given block out."""
        key = (block.size, block.address)
        self.keys.pop(bisect.bisect_left(self.keys, key))
        del self.blocks[key]

    def take(self, size: int) -> Block | None:
        """Take the smallest block of at least `size` bytes, or None."""
        index = bisect.bisect_left(self.keys, (size, -1))
        return self.blocks.pop(self.keys.pop(index)) if index < len(self.keys) else None


class CachingAllocator:
    """Serves requests by key. `capacity_bytes` is the limit of all segments together; None is no limit."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.retries = 0
        self._free: dict[Pool, FreeBlocks] = defaultdict(FreeBlocks)
        self._used: dict[int, Block] = {}
        self._next_address = 0

    def malloc(self, key: int, size: int, stream: int = 0) -> None:
        """Serve one request; zero bytes cost nothing. Raises OutOfMemory."""
        if size == 0:
            return
        size = round_request(size)
        pool = Pool(stream, size <= SMALL_REQUEST)
        block = self._free[pool].take(size) or self._grow_or_retry(size, pool)
        self._split(block, size)
        block.in_use = True
        self._used[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: int) -> None:
        """Give one request's block back to its pool, merged with free neighbours."""
        block = self._used.pop(key, None)
        if block is None:
            return
        block.in_use = False
        self.allocated -= block.size
        for neighbour in (block.previous, block.next):
            if neighbour is not None and not neighbour.in_use and neighbour.mapped:
                self._free[block.pool].remove(neighbour)
                _merge(block, neighbour)
        self._free[block.pool].add(block)

    def empty_cache(self) -> None:
        """Give segments that are free as a whole back to the driver, except those of CUDA graphs."""
        for _, pool in self._emptied_pools():
            for block in list(pool.blocks.values()):
                if block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _emptied_pools(self) -> list[tuple[Pool, FreeBlocks]]:
        return [(key, pool) for key, pool in self._free.items() if key.stream != GRAPHS]

    def block_of(self, key: int) -> Block:
        """Return the block that serves a request."""
        return self._used[key]

    def used_blocks(self) -> list[Block]:
        """Return the blocks in use."""
        return list(self._used.values())

    def free_blocks(self) -> list[Block]:
        """Return the free blocks of all pools."""
        return [block for pool in self._free.values() for block in pool.blocks.values()]

    def _grow(self, size: int, pool: Pool) -> Block:
        segment = segment_size(size)
        self._reserve(segment)
        block = Block(self._next_address, segment, pool)
        self._next_address += segment + SEGMENT_ROUNDING  # a gap: neighbouring segments never merge
        return block

    def _grow_or_retry(self, size: int, pool: Pool) -> Block:
        """Ask the driver; at the limit empty the cache, ask once more, then give up."""
        try:
            return self._grow(size, pool)
        except OutOfMemory:
            self.retries += 1
            self.empty_cache()
            return self._grow(size, pool)

    def _reserve(self, amount: int) -> None:
        if self.capacity_bytes is not None and self.reserved + amount > self.capacity_bytes:
            raise OutOfMemory(amount, self.reserved, self.capacity_bytes)
        self.reserved += amount
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if rest >= MINIMUM_BLOCK if self._splits_finely(block) else rest > SMALL_REQUEST:
            self._free[block.pool].add(_cut(block, size))

    def _splits_finely(self, block: Block) -> bool:
        return block.pool.small


class ExpandableAllocator(CachingAllocator):
    """The variant under `PYTORCH_ALLOC_CONF=expandable_segments:True`: memory is mapped page by page."""

    SPACE = 2**30 * LARGE_SEGMENT  # a multiple of both page sizes

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self._unmapped: dict[Pool, list[Block]] = {}

    def empty_cache(self) -> None:
        """Unmap the whole pages inside free blocks, except those of CUDA graphs."""
        for key, pool in self._emptied_pools():
            page = SMALL_SEGMENT if key.small else LARGE_SEGMENT
            for block in list(pool.blocks.values()):
                start = -(-block.address // page) * page
                end = (block.address + block.size) // page * page
                if end <= start:
                    continue
                pool.remove(block)
                if block.address < start:
                    tail = _cut(block, start - block.address)
                    pool.add(block)
                    block = tail
                if block.address + block.size > end:
                    pool.add(_cut(block, end - block.address))
                self.reserved -= block.size
                block.mapped = False
                self._merge_unmapped(block)

    def _merge_unmapped(self, block: Block) -> None:
        unmapped = self._unmapped[block.pool]
        for neighbour in (block.previous, block.next):
            if neighbour is not None and not neighbour.mapped:
                unmapped.remove(neighbour)
                _merge(block, neighbour)
        bisect.insort(unmapped, block, key=lambda b: b.address)

    def _grow(self, size: int, pool: Pool) -> Block:
        """Map pages from the first unmapped stretch with room, using a free block right before it."""
        if pool not in self._unmapped:
            start = self.SPACE * (2 * pool.stream + 2 - pool.small)
            self._unmapped[pool] = [Block(start, self.SPACE, pool, mapped=False)]
        block = self._find_room(size, pool)
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            assert block.next is not None
            block = self._map(block.next, min(size - block.size, block.next.size))
        self._free[pool].remove(block)
        return block

    def _find_room(self, size: int, pool: Pool) -> Block:
        for unmapped in self._unmapped[pool]:
            before = unmapped.previous
            first = (
                before if before is not None and before.mapped and not before.in_use else unmapped
            )
            room = 0
            block: Block | None = first
            while room < size and block is not None and not block.in_use:
                room += block.size
                block = block.next
            if room >= size:
                return first
        raise AssertionError("the address space of a pool is larger than any request")

    def _map(self, block: Block, size: int) -> Block:
        """Back the first `size` bytes of an unmapped block, in whole pages, and merge with free neighbours."""
        page = SMALL_SEGMENT if block.pool.small else LARGE_SEGMENT
        size = min(-(-size // page) * page, block.size)
        self._reserve(size)
        self._unmapped[block.pool].remove(block)
        if block.size > size:
            bisect.insort(
                self._unmapped[block.pool], _cut(block, size, mapped=False), key=lambda b: b.address
            )
        block.mapped = True
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.mapped and not neighbour.in_use:
                self._free[block.pool].remove(neighbour)
                _merge(block, neighbour)
        self._free[block.pool].add(block)
        return block

    def _splits_finely(self, block: Block) -> bool:
        return True


def _cut(block: Block, size: int, mapped: bool = True) -> Block:
    """Shorten a block to `size` bytes and return the rest as a new neighbour."""
    rest = Block(
        block.address + size,
        block.size - size,
        block.pool,
        mapped=mapped,
        previous=block,
        next=block.next,
    )
    if block.next is not None:
        block.next.previous = rest
    block.next, block.size = rest, size
    return rest


def _merge(block: Block, neighbour: Block) -> None:
    """Extend a block over its neighbour on either side."""
    if neighbour is block.previous:
        block.address = neighbour.address
        block.previous = neighbour.previous
        if block.previous is not None:
            block.previous.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.previous = block
    block.size += neighbour.size
