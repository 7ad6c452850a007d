"""A trace played through the allocator: peaks, whether it fits, the live storages at the worst moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from mpt.planner.facts.verdict import sure_share
from mpt.planner.trace.allocator import (
    CachingAllocator,
    ExpandableAllocator,
    OutOfMemory,
    round_request,
)
from mpt.planner.trace.further_steps import last_birth, perform_further_steps, serve
from mpt.planner.trace.trace import CATEGORIES, Trace

COPYING = 1
"""The stream that batches are copied to the device on (`mpt.data.loading.loader.prefetch`), alongside the computing
one,
0.
"""


@dataclass(frozen=True)
class Replay:
    """The allocator's history. `fits` is False when a request failed at the capacity even after emptying the cache."""

    allocated: int
    reserved: int
    fits: bool
    retries: int
    peak_event: int
    """Index of the event that set the allocated peak, or of the request that failed; of the last event if that was
    in a further step.
    """


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
) -> Replay:
    """Play a trace. `sizes` replaces the storages' sizes.

    If the cache has to be emptied, further steps are played too (`mpt.planner.trace.further_steps`).
    """
    allocator = (ExpandableAllocator if expandable else CachingAllocator)(capacity_bytes)
    storages = trace.storages
    requests = [
        (size, COPYING if storage.category == "batch" else storage.stream)
        for storage, size in zip(storages, _sizes(trace, sizes), strict=True)
    ]
    peak_event, peak, event = 0, 0, 0
    fits = True
    try:
        for event, entry in enumerate(trace.events[: last_birth(trace.events) + 1]):
            if entry < 0:
                allocator.free(~entry)
                continue
            serve(allocator, storages[entry], entry, requests[entry])
            if allocator.allocated > peak:
                peak, peak_event = allocator.allocated, event
        if allocator.retries:
            perform_further_steps(allocator, trace, requests)
    except OutOfMemory:
        fits, peak_event = False, event
    return Replay(
        allocator.peak_allocated, allocator.peak_reserved, fits, allocator.retries, peak_event
    )


def fits_at_all_and_surely(
    trace: Trace,
    budget_bytes: int,
    context_bytes: int,
    sizes: Sequence[int] | None = None,
    expandable: bool = False,
) -> tuple[bool, bool]:
    """Return whether a trace gets through a budget, and whether it is of the class that fits
    (`mpt.planner.facts.verdict`): with room to spare, and without emptying the cache.
    """
    capacity = budget_bytes - context_bytes
    if peak_live(trace, sizes) > capacity:
        return False, False
    played = replay(trace, capacity, sizes=sizes, expandable=expandable)
    taken = played.reserved + context_bytes
    return played.fits, played.fits and not played.retries and taken <= sure_share() * budget_bytes


def split_at(trace: Trace, event: int, modules: int = 10) -> Split:
    """Return the live bytes after an event, largest modules first."""
    by_category: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    for index in trace.live_at(event):
        storage = trace.storages[index]
        size = round_request(storage.size)
        by_category[storage.category] += size
        by_module[storage.module or "(outside modules)"] += size
    ordered = {name: by_category[name] for name in CATEGORIES if by_category[name]}
    return Split(ordered, by_module.most_common(modules), str(trace.span_at(event)))


def peak_live(
    trace: Trace,
    sizes: Sequence[int] | None = None,
    categories: Container[str] = frozenset(CATEGORIES),
) -> int:
    """Return the most bytes alive at once, rounded as the allocator rounds them: no replay can do with less."""
    rounded = [
        round_request(size) if size and storage.category in categories else 0
        for storage, size in zip(trace.storages, _sizes(trace, sizes), strict=True)
    ]
    return max(
        accumulate(rounded[entry] if entry >= 0 else -rounded[~entry] for entry in trace.events),
        default=0,
    )


def timeline(trace: Trace, points: int = 600) -> dict[str, list[int]]:
    """Return live bytes per category after every event, thinned to about `points` that keep each stretch's maximum."""
    rounded = [round_request(storage.size) for storage in trace.storages]
    changes = [rounded[entry] if entry >= 0 else -rounded[~entry] for entry in trace.events]
    totals = list(accumulate(changes))
    stretch = max(1, len(totals) // points)
    starts = range(0, len(totals), stretch)
    chosen = {
        max(range(start, min(start + stretch, len(totals))), key=totals.__getitem__)
        for start in starts
    }
    live: Counter[str] = Counter()
    kept: list[dict[str, int]] = []
    for event, (entry, change) in enumerate(zip(trace.events, changes, strict=True)):
        live[trace.storages[entry if entry >= 0 else ~entry].category] += change
        if event in chosen:
            kept.append(dict(live))
    return {
        name: [row.get(name, 0) for row in kept]
        for name in CATEGORIES
        if any(row.get(name) for row in kept)
    }


def _sizes(trace: Trace, sizes: Sequence[int] | None) -> Sequence[int]:
    return [storage.size for storage in trace.storages] if sizes is None else sizes
