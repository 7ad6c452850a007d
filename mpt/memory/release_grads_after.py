"""Release the gradients of some networks right after their optimizer's step.

The step clears gradients when an update begins, so a discriminator's gradients outlive its own update and remain
alongside the generator's at its peak. Released at once they do not. Nothing reads gradients after a step: the result is
bit-equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import ClassVar

from pydantic import Field
from torch.optim import Optimizer

from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.seams import MemoryTrick, Phase, Run

SHARDED = True


class Settings(Options):
    """Which networks: `release_grads_after: [disc]`, or `true` for all that are trained."""

    shorthand: ClassVar[str | None] = "modules"

    modules: list[str] = Field(default_factory=lambda: ["*"])
    """Globs over the names of the trained networks."""


class ReleaseGradients(MemoryTrick):
    """Clears gradients once the whole step of a phase is done.

    Not in a hook of the optimizer: a precision mode may let it step several times in one update (`bf16-sr`), and the
    later steps would find no gradients.
    """

    name = "release_grads_after"

    def __init__(self, settings: Settings) -> None:
        self.globs = settings.modules
        self.released: set[Optimizer] = set()
        """The optimizers of the chosen networks."""

    def attach(self, run: Run) -> None:
        """Find the chosen networks' optimizers."""
        chosen: set[str] = set()
        for glob in self.globs:
            found = {name for name in run.task.trainable if fnmatchcase(name, glob)}
            if not found:
                names = ", ".join(run.task.trainable)
                raise ConfigError(
                    f"memory.release_grads_after: no network is named {glob!r}; trained are {names}"
                )
            chosen |= found
        self.released = {run.optimizers[name] for name in chosen}

    @contextlib.contextmanager
    def step(self, phase: Phase) -> Iterator[None]:
        """Release the gradients of the optimizer and of the network it trains, which differ under master weights."""
        yield
        if phase.optimizer in self.released:
            phase.optimizer.zero_grad(set_to_none=True)
            phase.module.zero_grad(set_to_none=True)


def build(settings: Settings) -> ReleaseGradients:
    """Build the trick."""
    return ReleaseGradients(settings)
