"""A plan as a memory snapshot of PyTorch: pytorch.org/memory_viz shows a run that never happened.

The trace is played through the model of the allocator, and each request, segment and release is written as
`torch.cuda.memory._snapshot` would record it (`torch/csrc/cuda/memory_snapshot.cpp`, `torch/cuda/_memory_viz.py`), with
module and operator in the place of a stack, and the category in the place of a file's name. Times are the order of
events and no seconds.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from mpt.planner.trace.allocator import (
    GRAPHS,
    Block,
    CachingAllocator,
    ExpandableAllocator,
    OutOfMemory,
)
from mpt.planner.trace.replay import COPYING
from mpt.planner.trace.trace import EMPTIED, Storage, Trace
from mpt.run.process.files import write_atomically

BASE = 0x7F00_0000_0000
"""The first address: in a driver's range, and small enough for the viewer's numbers."""
POOL_SPACE = 2**40
"""Between the addresses of two pools of expandable segments."""


class SegmentLog:
    """Which segments there are, by address, and an entry for each that came or went."""

    def __init__(self, mapped: bool) -> None:
        self.entries: list[dict[str, Any]] = []
        self.words = (
            ("segment_map", "segment_unmap") if mapped else ("segment_alloc", "segment_free")
        )
        self.frames: list[dict[str, Any]] = []
        """Of the request that is being served."""
        self._pools: dict[Any, int] = {}

    def address(self, block: Block) -> int:
        """Return a block's address as the snapshot has it."""
        space = ExpandableAllocator.SPACE
        if self.words[0] == "segment_alloc":
            return BASE + block.address
        number = self._pools.setdefault(block.pool, len(self._pools))
        return BASE + number * POOL_SPACE + block.address % space

    def note(self, block: Block, size: int, came: bool) -> None:
        """Note that memory came from the driver, or went back."""
        self.add(self.words[0 if came else 1], self.address(block), size, block.pool.stream)

    def add(self, action: str, address: int, size: int, stream: int) -> None:
        """Append an entry."""
        self.entries.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": stream,
                "time_us": len(self.entries),
                "frames": self.frames,
                "compile_context": "N/A",
                "user_metadata": "",
            }
        )


class LoggedAllocator(CachingAllocator):
    """Writes down its segments."""

    def __init__(self, capacity_bytes: int | None, log: SegmentLog) -> None:
        super().__init__(capacity_bytes)
        self.log = log

    def empty_cache(self) -> None:
        """Give back segments that are free as a whole."""
        whole = [one for one in self.free_blocks() if one.previous is None and one.next is None]
        super().empty_cache()
        kept = set(map(id, self.free_blocks()))
        for block in whole:
            if id(block) not in kept:
                self.log.note(block, block.size, came=False)

    def _grow(self, size: int, pool: Any) -> Block:
        block = super()._grow(size, pool)
        self.log.note(block, block.size, came=True)
        return block


class LoggedExpandable(ExpandableAllocator):
    """Writes down the pages that it maps."""

    def __init__(self, capacity_bytes: int | None, log: SegmentLog) -> None:
        super().__init__(capacity_bytes)
        self.log = log

    def _map(self, block: Block, size: int) -> Block:
        address, before = block.address, self.reserved
        mapped = super()._map(block, size)
        self.log.note(Block(address, 0, block.pool), self.reserved - before, came=True)
        return mapped

    def _merge_unmapped(self, block: Block) -> None:
        self.log.note(block, block.size, came=False)
        super()._merge_unmapped(block)


def make_snapshot(
    trace: Trace, capacity_bytes: int | None = None, expandable: bool = False
) -> dict[str, Any]:
    """Return a trace as the mapping that `torch.cuda.memory._snapshot` returns.

    It ends with the request that does not fit into `capacity_bytes`, if one does not.
    """
    log = SegmentLog(expandable)
    allocator = (LoggedExpandable if expandable else LoggedAllocator)(capacity_bytes, log)
    owners: dict[int, Storage] = {}
    placed: dict[int, int] = {}
    for entry in trace.events:
        number = entry if entry >= 0 else ~entry
        storage = trace.storages[number]
        if storage.operator == EMPTIED:
            allocator.empty_cache()
        if storage.size == 0:
            continue
        log.frames = frames_of(storage)
        if entry < 0:
            allocator.free(number)
            for action in ("free_requested", "free_completed"):
                log.add(action, placed[number], storage.size, storage.stream)
            del owners[number], placed[number]
            continue
        stream = COPYING if storage.category == "batch" else storage.stream
        try:
            allocator.malloc(number, storage.size, stream)
        except OutOfMemory:
            log.add("oom", 0, storage.size, stream)
            log.entries[-1]["device_free"] = max(0, (capacity_bytes or 0) - allocator.reserved)
            break
        owners[number] = storage
        placed[number] = log.address(allocator.block_of(number))
        log.add("alloc", placed[number], storage.size, stream)
    return {
        "segments": segments_of(allocator, log, owners, expandable),
        "device_traces": [log.entries],
        "external_annotations": [],
        "allocator_settings": {"expandable_segments": expandable},
    }


def frames_of(storage: Storage) -> list[dict[str, Any]]:
    """Return the frames of an allocation's stack."""
    name = f"{storage.module or '(outside modules)'} {storage.operator}".strip()
    return [{"filename": storage.category, "line": 0, "name": name}]


def segments_of(
    allocator: CachingAllocator, log: SegmentLog, owners: dict[int, Storage], expandable: bool
) -> list[dict[str, Any]]:
    """Return the segments at the end, each with its blocks in the order of addresses."""
    used = {id(allocator.block_of(number)): storage for number, storage in owners.items()}
    blocks = [*allocator.used_blocks(), *allocator.free_blocks()]
    segments = []
    for first in blocks:
        if first.previous is not None and first.previous.mapped:
            continue
        chain: list[Block] = []
        block: Block | None = first
        while block is not None and block.mapped:
            chain.append(block)
            block = block.next
        rows = [block_record(one, log.address(one), used.get(id(one))) for one in chain]
        active = sum(one.size for one in chain if one.in_use)
        segments.append(
            {
                "device": 0,
                "address": log.address(first),
                "total_size": sum(one.size for one in chain),
                "allocated_size": active,
                "active_size": active,
                "requested_size": sum(row["requested_size"] for row in rows),
                "stream": first.pool.stream,
                "segment_type": "small" if first.pool.small else "large",
                "segment_pool_id": (0, int(first.pool.stream == GRAPHS)),
                "is_expandable": expandable,
                "frames": [],
                "blocks": rows,
            }
        )
    return sorted(segments, key=lambda segment: segment["address"])


def block_record(block: Block, address: int, storage: Storage | None) -> dict[str, Any]:
    """Return a block as a snapshot has it."""
    return {
        "address": address,
        "size": block.size,
        "requested_size": storage.size if storage is not None else 0,
        "state": "active_allocated" if block.in_use else "inactive",
        "frames": frames_of(storage) if storage is not None else [],
    }


def write_snapshot(path: Path, snapshot: dict[str, Any]) -> None:
    """Write a snapshot as `torch.cuda.memory._dump_snapshot` does. Raises InputOutputError."""
    write_atomically(path, pickle.dumps(snapshot), durable=False)
