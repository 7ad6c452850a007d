"""A script's questions about the memory that it holds on the card: that of the plan so far, and what it gives back.

Some divide by the answer, and some choose a batch by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.trace import Trace

LIVE = ("memory_allocated", "memory_reserved", "memory_cached")
PEAK = ("max_memory_allocated", "max_memory_reserved", "max_memory_cached")
RESETS = ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")


class Meter:
    """Bytes of tensors in a trace that grows: at present, and the most since it was reset."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._seen = self._live = self._peak = 0

    def _read(self) -> None:
        storages, events = self._trace.storages, self._trace.events
        for entry in events[self._seen :]:
            self._live += storages[entry].size if entry >= 0 else -storages[~entry].size
            self._peak = max(self._peak, self._live)
        self._seen = len(events)

    def live(self, device: Any = None) -> int:
        """Return the bytes that are alive."""
        self._read()
        return self._live

    def peak(self, device: Any = None) -> int:
        """Return the most bytes that were alive."""
        self._read()
        return self._peak

    def reset(self, device: Any = None) -> None:
        """Forget the peak."""
        self._read()
        self._peak = self._live

    def statistics(self, device: Any = None) -> Counter[str]:
        """Return the numbers of `torch.cuda.memory_stats` that scripts print; others are 0."""
        found: Counter[str] = Counter()
        for kind in ("allocated", "reserved", "active", "requested"):
            found[f"{kind}_bytes.all.current"] = self.live()
            found[f"{kind}_bytes.all.peak"] = self.peak()
        return found


@contextmanager
def memory_told(recorder: Recorder, usable: int) -> Iterator[None]:
    """Answer questions about the card's memory inside the block, of a card with `usable` bytes."""
    meter = Meter(recorder.trace)
    answers: dict[str, Any] = {
        **dict.fromkeys(LIVE, meter.live),
        **dict.fromkeys(PEAK, meter.peak),
        **dict.fromkeys(RESETS, meter.reset),
        "empty_cache": recorder.empties_cache,
        "memory_stats": meter.statistics,
        "mem_get_info": lambda device=None: (max(0, usable - meter.live()), usable),
        "get_memory_info": lambda device=None: (max(0, usable - meter.live()), usable),
    }
    with ExitStack() as stack:
        for module in (torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory):
            named = {name: one for name, one in answers.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **named))
        yield
