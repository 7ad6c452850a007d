"""A trace played through the allocator: peaks, whether it fits, what was alive at the worst moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpt.plan.allocator import CachingAllocator, ExpandableAllocator, OutOfMemory, round_request
from mpt.plan.trace import CATEGORIES, Trace


@dataclass(frozen=True)
class Replay:
    """What the allocator did. `fits` is False when a request failed at the capacity even after emptying the cache."""

    allocated: int
    reserved: int
    fits: bool
    retries: int
    peak_event: int
    """Index of the event that set the allocated peak, or of the request that failed."""


@dataclass(frozen=True)
class Split:
    """Bytes alive at the peak, by category and by owning module."""

    by_category: dict[str, int] = field(default_factory=dict)
    by_module: list[tuple[str, int]] = field(default_factory=list)
    moment: str = ""


def replay(
    trace: Trace,
    capacity_bytes: int | None = None,
    *,
    sizes: Sequence[int] | None = None,
    expandable: bool = False,
    empty_at: frozenset[int] = frozenset(),
) -> Replay:
    """Play a trace. `sizes` replaces the storages' sizes; `empty_at` are events before which the cache is emptied."""
    allocator = (ExpandableAllocator if expandable else CachingAllocator)(capacity_bytes)
    storages = trace.storages
    peak_event, peak, event = 0, 0, 0
    try:
        for event, entry in enumerate(trace.events):
            if event in empty_at:
                allocator.empty_cache()
            if entry < 0:
                allocator.free(~entry)
                continue
            allocator.malloc(entry, storages[entry].size if sizes is None else sizes[entry])
            if allocator.allocated > peak:
                peak, peak_event = allocator.allocated, event
    except OutOfMemory:
        return Replay(allocator.peak_allocated, allocator.peak_reserved, False, allocator.retries, event)
    return Replay(allocator.peak_allocated, allocator.peak_reserved, True, allocator.retries, peak_event)


def split_at(trace: Trace, event: int, sizes: Sequence[int] | None = None, modules: int = 10) -> Split:
    """Return what is alive right after an event, largest modules first."""
    by_category: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    for index in trace.live_at(event):
        storage = trace.storages[index]
        size = round_request(storage.size if sizes is None else sizes[index])
        by_category[storage.category] += size
        by_module[storage.module or "(outside modules)"] += size
    ordered = {name: by_category[name] for name in CATEGORIES if by_category[name]}
    return Split(ordered, by_module.most_common(modules), str(trace.span_at(event)))


def timeline(trace: Trace, sizes: Sequence[int] | None = None, points: int = 600) -> dict[str, list[int]]:
    """Return live bytes per category after every event, thinned to about `points` that keep each stretch's maximum."""
    live: Counter[str] = Counter()
    rows: list[dict[str, int]] = []
    for entry in trace.events:
        index = entry if entry >= 0 else ~entry
        storage = trace.storages[index]
        size = round_request(storage.size if sizes is None else sizes[index])
        live[storage.category] += size if entry >= 0 else -size
        rows.append(dict(live))
    stretch = max(1, len(rows) // points)
    kept = [
        max(rows[start : start + stretch], key=lambda row: sum(row.values())) for start in range(0, len(rows), stretch)
    ]
    return {name: [row.get(name, 0) for row in kept] for name in CATEGORIES if any(row.get(name) for row in kept)}
