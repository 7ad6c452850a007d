"""Let the CUDA allocator grow its segments instead of collecting blocks of fixed sizes.

Memory that is reserved but too fragmented to use is the difference between `reserved` and `allocated`; growing segments
shrink it if sizes vary from step to step (micro-batches, lazy regularisation). Results are unchanged. On other
devices there is nothing to set. The same as PYTORCH_ALLOC_CONF=expandable_segments:True, without restarting.
"""

from __future__ import annotations

import torch

from mpt.config.options import Options
from mpt.seams import MemoryTrick, Run

RELIEVES = "fragmentation"
SHARDED = True
PROPOSALS = (True,)
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


class Settings(Options):
    """Nothing to set."""


class ExpandableSegments(MemoryTrick):
    """One setting of the allocator, made before the first step."""

    name = "expandable_segments"

    def attach(self, run: Run) -> None:
        """Set the allocator; memory reserved before keeps its old segments."""
        if run.device.type == "cuda":
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        else:
            run.notes.append(
                f"memory.expandable_segments: only CUDA's allocator has them; nothing to do on {run.device}"
            )


def build(settings: Settings) -> ExpandableSegments:
    """Build the trick."""
    return ExpandableSegments()
