"""Give unused cached memory back to the driver every that many updates.

Helps if another process shares the card, or if rare phases leave blocks of odd sizes behind; costs a
synchronisation and new allocations each time. Results are unchanged. On other devices there is nothing to empty.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import torch
from pydantic import Field

from mpt import accelerator
from mpt.config.options import Options
from mpt.seams import MemoryTrick, Phase, Run

SHARDED = True


class Settings(Options):
    """How often: `empty_cache_every: 100`."""

    shorthand: ClassVar[str | None] = "updates"

    updates: int = Field(100, ge=1)
    """Updates from one emptying to the next, over all phases."""


class EmptyCacheEvery(MemoryTrick):
    """Counts updates."""

    name = "empty_cache_every"

    def __init__(self, settings: Settings) -> None:
        self.updates = settings.updates
        self.count = 0
        self.has_cache = False

    def attach(self, run: Run) -> None:
        """Say if there is nothing to empty."""
        self.has_cache = accelerator.has_allocator(run.device)
        if not self.has_cache:
            run.notes.append(
                f"memory.empty_cache_every: {run.device} has no cache to empty; nothing is done"
            )

    @contextlib.contextmanager
    def step(self, phase: Phase) -> Iterator[None]:
        """Empty the cache when it is time."""
        yield
        self.count += 1
        if self.has_cache and self.count % self.updates == 0:
            torch.accelerator.empty_cache()


def build(settings: Settings) -> EmptyCacheEvery:
    """Build the trick."""
    return EmptyCacheEvery(settings)
