"""The steps after the traced ones: the last traced step again, on the memory as the earlier ones have left it.

A step that gets through only by emptying the cache leaves other segments behind than it found. On a card such steps
often got through once or twice and ran out of memory in the third.

A storage that was alive when the step began and dies in it, such as a gradient of the step before, has an heir: the
storage of the same size and stream that is alive at its end, in the order of births. In the next step the heir dies
in its place. A step whose storages do not pair up is not repeated, nor are recorded graphs, which are recorded once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpt.planner.trace.allocator import CachingAllocator
from mpt.planner.trace.trace import EMPTIED, Storage, Trace

LEAST, MOST = 2, 4
"""Further steps: at least as many as make the four that were tried on a card, and until one no longer empties the
cache, but no more than this.
"""
Request = tuple[int, int]
"""A storage's bytes and stream."""


@dataclass(frozen=True)
class RepeatedStep:
    """A step up to its last birth."""

    events: Sequence[int]
    heirs: dict[int, int]
    """Storage that was alive when it began, and dies in it -> the one in its place at the end."""
    freed_at_end: list[int]
    """Storages that die after the last birth and have no counterpart at the beginning."""


def perform_further_steps(
    allocator: CachingAllocator, trace: Trace, requests: Sequence[Request]
) -> None:
    """Serve the last step again. Raises OutOfMemory.

    The allocator has served the trace up to its last birth.
    """
    step = repeated_step(trace, requests)
    if step is None:
        return
    number = len(requests)
    numbers: dict[int, int] = {}
    """Storage -> its number in the allocator if that is another."""
    for further in range(1, MOST + 1):
        for storage in step.freed_at_end:
            allocator.free(numbers.get(storage, storage))
        numbers = {old: numbers.get(heir, heir) for old, heir in step.heirs.items()}
        retries = allocator.retries
        for entry in step.events:
            if entry < 0:
                allocator.free(numbers.get(~entry, ~entry))
                continue
            numbers[entry] = number
            serve(allocator, trace.storages[entry], number, requests[entry])
            number += 1
        if further >= LEAST and allocator.retries == retries:
            return


def serve(allocator: CachingAllocator, storage: Storage, number: int, request: Request) -> None:
    """Serve a storage's request, of which one kind marks that the cache is emptied. Raises OutOfMemory."""
    if storage.operator == EMPTIED:
        allocator.empty_cache()
    allocator.malloc(number, *request)


def repeated_step(trace: Trace, requests: Sequence[Request]) -> RepeatedStep | None:
    """Return a trace's last step, or None if it is the only one or leaves other storages than it found."""
    last = trace.spans[-1].step if trace.spans else 0
    if not last or trace.is_recorded:
        return None
    start = next(span.start for span in trace.spans if span.step == last)
    stop = last_birth(trace.events) + 1
    at_start, at_end = trace.live_at(start - 1), trace.live_at(stop - 1)
    dying = {~entry for entry in trace.events[start:] if entry < 0}
    kept = (at_start & at_end) - dying
    old, new = by_request(at_start - kept, requests), by_request(at_end - kept, requests)
    heirs: dict[int, int] = {}
    freed_at_end: list[int] = []
    for request in old.keys() | new.keys():
        before, after = old[request], new[request]
        surplus = {*[one for one in after if one in dying][: max(0, len(after) - len(before))]}
        freed_at_end += surplus
        after = [one for one in after if one not in surplus]
        if len(before) != len(after):
            return None
        heirs.update(zip(before, after, strict=True))
    return RepeatedStep(trace.events[start:stop], heirs, freed_at_end)


def last_birth(events: Sequence[int]) -> int:
    """Return the index of the last birth, -1 if there is none; the deaths after it change no replay."""
    return next((at for at in range(len(events) - 1, -1, -1) if events[at] >= 0), -1)


def by_request(
    storages: Iterable[int], requests: Sequence[Request]
) -> defaultdict[Request, list[int]]:
    """Return the storages that take memory by what was requested for them, in the order of births."""
    found: defaultdict[Request, list[int]] = defaultdict(list)
    for storage in sorted(storages):
        if requests[storage][0]:
            found[requests[storage]].append(storage)
    return found
