"""What every memory trick does unless it says otherwise: nothing.

A trick meets the run at three moments: `apply` after the task is built and before precision and optimizers, `attach`
when everything is built, and `forward`, a context entered around every forward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mpt.seams import Phase, Precision, Task


class Trick:
    """The base of the tricks. Implements `mpt.seams.MemoryTrick`."""

    name: str
    exact = True
    replaces_optimizers = False
    """Such tricks are attached first: what others hang on an optimizer would be lost with it."""

    def apply(self, task: Task, precision: Precision) -> None:
        """Change the built task, before optimizers exist."""

    def attach(self, run: Any) -> None:
        """Change the built run (`mpt.engine.build.Run`), before its first step."""

    def abandon(self, phase: Phase) -> None:
        """Forget what was begun of a phase's update that failed and will be repeated."""

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of one forward."""
        return nullcontext()
