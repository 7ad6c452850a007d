"""Release the gradients of some networks right after their optimizer's step.

The step clears gradients when an update begins, so a discriminator's gradients outlive its own update and stand
beside the generator's at its peak. Released at once they do not. Nothing reads gradients after a step: the result is
bit-equal.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, ClassVar

from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.seams import MemoryTrick, Run

SHARDED = True


class Settings(Options):
    """Which networks: `release_grads_after: [disc]`, or `true` for all that are trained."""

    shorthand: ClassVar[str | None] = "modules"

    modules: list[str] = Field(default_factory=lambda: ["*"])
    """Globs over the names of the trained networks."""


class ReleaseGradients(MemoryTrick):
    """A hook after the step of each chosen network's optimizer."""

    name = "release_grads_after"

    def __init__(self, settings: Settings) -> None:
        self.globs = settings.modules

    def attach(self, run: Run) -> None:
        """Hang a hook on the chosen networks' optimizers."""
        chosen: set[str] = set()
        for glob in self.globs:
            found = {name for name in run.task.trainable if fnmatchcase(name, glob)}
            if not found:
                names = ", ".join(run.task.trainable)
                raise ConfigError(f"memory.release_grads_after: no network is named {glob!r}; trained are {names}")
            chosen |= found
        for name in sorted(chosen):
            release = Release(run.task.trainable[name])
            run.optimizers[name].register_step_post_hook(release)


class Release:
    """Clears the gradients of an optimizer and of the network it trains, which differ under master weights."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        self.module.zero_grad(set_to_none=True)


def build(settings: Settings) -> ReleaseGradients:
    """Build the trick."""
    return ReleaseGradients(settings)
