"""The time of each rank for a step, and a warning of one that all others wait for."""

from __future__ import annotations

import statistics
from typing import Any

from mpt.engine.state.journal import Journal
from mpt.parallel.world import World

STRAGGLER, SETTLED_STEPS = 1.5, 10
"""A rank whose steps take that many times the median's is named, after the first steps."""
LEAST_WINDOWS, LEAST_STEPS = 3, 20
"""So many log lines in a row, and steps, one rank must be slow for: a busy machine holds up any rank for a moment."""
LEAST_SECONDS = 0.01
"""... and longer by so much: less is the noise of a busy machine."""


class RankTimes:
    """Compares the ranks of a training at each log line."""

    def __init__(self, world: World, journal: Journal) -> None:
        self.world, self.journal = world, journal
        self.last: dict[str, Any] = {}
        """Seconds per step and peak of each rank, of the last window."""
        self.slow_rank: int | None = None
        self.slow_windows, self.slow_steps = 0, 0
        """For how many log lines and steps that rank has been slow without a break."""
        self.is_named = False

    def take(self, seconds: float, steps: int, peak_bytes: int) -> dict[str, Any]:
        """Return, for the log, each rank's time for a step without waiting for others, and its peak.

        `seconds` is the time of a step of the window here. Call on all ranks; one that stays slow is named once.
        """
        world = self.world
        if world.size == 1:
            return {}
        busy = seconds - world.take_waited_seconds() / max(steps, 1)
        told = world.collect((busy, peak_bytes))
        self.last = {
            "step_seconds": [max(one, 0.0) for one, _ in told],
            "peak_bytes": [peak for _, peak in told],
        }
        times = self.last["step_seconds"]
        slowest, others = max(times), statistics.median_low(times)  # of two ranks, the faster one's
        is_slow = slowest > STRAGGLER * others and slowest - others > max(
            LEAST_SECONDS, 0.2 * seconds
        )
        is_settled = self.journal.progress.step > SETTLED_STEPS
        if (
            self.stays_slow(times.index(slowest) if is_slow and is_settled else None, steps)
            and not self.is_named
        ):
            self.is_named = True
            self.journal.warn(
                f"rank {times.index(slowest)} is slow: {slowest:.3g} s per step without waiting, {others:.3g} s on the "
                "median rank, and all wait for it",
                "straggler",
                rank=times.index(slowest),
            )
        return {"ranks": self.last}

    def stays_slow(self, rank: int | None, steps: int) -> bool:
        """Count a window in which this rank was slow, None for none; return whether it has been so for long."""
        if rank is None or rank != self.slow_rank:
            self.slow_rank, self.slow_windows, self.slow_steps, self.is_named = rank, 0, 0, False
        self.slow_windows += 1
        self.slow_steps += steps
        return (
            rank is not None
            and self.slow_windows >= LEAST_WINDOWS
            and self.slow_steps >= LEAST_STEPS
        )
