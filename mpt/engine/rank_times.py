"""What each rank needs for a step, and a warning of one that all others wait for."""

from __future__ import annotations

import statistics
from typing import Any

from mpt.engine.journal import Journal
from mpt.parallel.world import World

STRAGGLER, SETTLED_STEPS = 1.5, 10
"""A rank whose steps take so many times the median's is named, after the first steps."""
LEAST_SECONDS = 0.01
"""... and longer by so much: less is the noise of a busy machine."""


class RankTimes:
    """Compares the ranks of a training at each log line."""

    def __init__(self, world: World, journal: Journal) -> None:
        self.world, self.journal = world, journal
        self.last: dict[str, Any] = {}
        """Seconds per step and peak of each rank, of the last window."""

    def take(self, seconds: float, steps: int, peak_bytes: int) -> dict[str, Any]:
        """Return, for the log, what each rank needed for a step without waiting for others, and its peak.

        `seconds` is what a step of the window took here. Call on all ranks; one that is slow is named.
        """
        world = self.world
        if world.size == 1:
            return {}
        busy = seconds - world.take_waited_seconds() / max(steps, 1)
        told = world.collect((busy, peak_bytes))
        self.last = {"step_seconds": [max(one, 0.0) for one, _ in told], "peak_bytes": [peak for _, peak in told]}
        times = self.last["step_seconds"]
        slowest, others = max(times), statistics.median_low(times)  # of two ranks, the faster one's
        is_slow = slowest > STRAGGLER * others and slowest - others > max(LEAST_SECONDS, 0.2 * seconds)
        if is_slow and self.journal.progress.step > SETTLED_STEPS:
            self.journal.warn(
                f"rank {times.index(slowest)} is slow: {slowest:.3g} s per step without waiting, {others:.3g} s on the "
                "median rank, and all wait for it",
                "straggler",
                rank=times.index(slowest),
            )
        return {"ranks": self.last}
