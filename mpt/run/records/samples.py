"""Which previews of a run stay: those spread evenly over the training, `train.keep_samples` of them, and the newest.

Once there are more, their distance in steps doubles. It is a function of the step alone, so a resume keeps the same.
"""

from __future__ import annotations

import contextlib
import os
import re

from mpt.run.process.operating_system import opened, unlink
from mpt.run.records.layout import RunDirectory

PREVIEW = re.compile(r"step-(\d{8,18})\.png", re.ASCII)


def distance(step: int, every: int, keep: int) -> int:
    """Return the steps between the previews that stay at this step: `every` times a power of two."""
    steps = max(every, 1)
    while step // steps >= keep:
        steps *= 2
    return steps


def thin(run: RunDirectory, step: int, every: int, keep: int) -> bool:
    """Remove the previews before this step that do not stay; return whether this step's will.

    Files that cannot be removed stay: room on the disk is no reason to end a training.
    """
    apart = distance(step, every, keep)
    if apart > max(every, 1):
        with contextlib.suppress(OSError), opened(run.samples) as folder:
            for name in os.listdir(folder):
                found = PREVIEW.fullmatch(name)
                if found is not None and int(found[1]) < step and int(found[1]) % apart:
                    unlink(name, folder)
    return step % apart == 0
