"""Births and deaths of storages during a step, with time, module and purpose: what `mpt.planner.trace.recorder` writes
down. They can be replayed through an allocator at any limit (`mpt.planner.trace.replay`).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from mpt.planner.trace.allocator import GRAPHS

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "buffers",
    "batch",
    "whole batch",
    "gathered parameters",
    "reduce buffers",
    "activations",
    "cast cache",
    "temporaries",
    "workspace",
)
FORWARD = "forward"
"""Provisional category of a forward's results: activations if it lives until backward, else temporaries."""
GATHERED = "gathered parameters"


@dataclass(slots=True)
class Storage:
    """One allocation."""

    size: int
    category: str
    module: str
    operator: str
    stream: int = 0
    """Its stream: each stream has pools of its own. A batch is copied on another one."""


@dataclass(frozen=True, slots=True)
class Span:
    """From event `start` on the run was in this moment of this phase."""

    start: int
    step: int
    phase: str
    moment: str

    def __str__(self) -> str:
        where = f"phase {self.phase}, {self.moment}" if self.phase else self.moment
        return f"{where} (step {self.step + 1})" if self.phase else where


@dataclass
class Trace:
    """`events` holds storage indices: `i` is the birth of storage i, `~i` its death.

    `workspaces` are asked for if there is room: how many events are before each, and its bytes.
    """

    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    workspaces: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_recorded(self) -> bool:
        """Whether recorded graphs allocate in it, which the host launches as one."""
        return any(storage.stream == GRAPHS for storage in self.storages)

    def span_at(self, event: int) -> Span:
        """Return the moment in which an event happened."""
        return self.spans[
            max(0, bisect.bisect_right([span.start for span in self.spans], event) - 1)
        ]

    def live_at(self, event: int) -> set[int]:
        """Return the storages alive right after an event."""
        live: set[int] = set()
        for entry in self.events[: event + 1]:
            live.add(entry) if entry >= 0 else live.discard(~entry)
        return live


def with_workspaces(trace: Trace) -> Trace:
    """Return a trace in which each workspace is a storage that is freed at once."""
    storages, events, start = [*trace.storages], list[int](), 0
    for place, size in trace.workspaces:
        events += [*trace.events[start:place], len(storages), ~len(storages)]
        storages.append(Storage(size, "workspace", "", "cuDNN"))
        start = place
    return Trace(storages, events + trace.events[start:], trace.spans)


def holds_tensors(trace: Trace) -> bool:
    """Return whether anything but workspaces lies on the device."""
    return any(one.size and one.category != "workspace" for one in trace.storages)


EMPTIED = "empty_cache"
"""The operator of a storage of no bytes, which marks the return of unused memory."""


def live_peak(trace: Trace, first: int = 0) -> int:
    """Return the most bytes that were alive at once, from event `first` on."""
    live = highest = 0
    for event, entry in enumerate(trace.events):
        live += trace.storages[entry].size if entry >= 0 else -trace.storages[~entry].size
        if event >= first:
            highest = max(highest, live)
    return highest
