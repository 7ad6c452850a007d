"""Give unused cached memory back to the driver every so many updates.

Helps where another process shares the card, or where rare phases leave blocks of odd sizes behind; costs a
synchronisation and new allocations each time. Results are unchanged. On other devices there is nothing to empty.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field

from mpt.config.options import Options
from mpt.seams import MemoryTrick, Run

SHARDED = True


class Settings(Options):
    """How often: `empty_cache_every: 100`."""

    shorthand: ClassVar[str | None] = "updates"

    updates: int = Field(100, ge=1)
    """Optimizer steps from one emptying to the next, over all phases."""


class EmptyCacheEvery(MemoryTrick):
    """Counts optimizer steps."""

    name = "empty_cache_every"

    def __init__(self, settings: Settings) -> None:
        self.updates = settings.updates
        self.count = 0

    def attach(self, run: Run) -> None:
        """Count the steps of every optimizer."""
        if run.device.type != "cuda":
            run.notes.append(f"memory.empty_cache_every: {run.device} has no cache to empty; nothing is done")
            return
        for optimizer in dict.fromkeys(run.optimizers.values()):
            optimizer.register_step_post_hook(self.after_step)

    def after_step(self, *_: Any) -> None:
        """Empty the cache when it is time."""
        self.count += 1
        if self.count % self.updates == 0:
            torch.cuda.empty_cache()


def build(settings: Settings) -> EmptyCacheEvery:
    """Build the trick."""
    return EmptyCacheEvery(settings)
