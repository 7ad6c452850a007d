"""Release gradients when an update begins, instead of filling them with zeros: torch's default and ours.

Released, gradients do not exist during the forward, and the first backward writes instead of adding. The trick is
here to be switched off (`set_to_none: false`), which keeps every gradient buffer for the life of the run: addresses
then stay the same, which some profilers want, at the price of one copy of the weights during the forward.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from mpt.config.options import Options
from mpt.nn.shared.mixin import Mixin, mix_in
from mpt.seams import MemoryTrick, Run

SHARDED = True


class Settings(Options):
    """`set_to_none: true` or `false`."""

    shorthand: ClassVar[str | None] = "enabled"

    enabled: bool = True
    """Release gradients when an update begins; false fills them with zeros instead."""


class KeepsModuleGradients(Mixin, nn.Module):
    """Mixed in front of a network's class: clearing gradients fills them with zeros."""

    is_outermost = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fill gradients with zeros."""
        super().zero_grad(set_to_none=False)


class KeepsGradients(Mixin, Optimizer):
    """Mixed in front of an optimizer's class: clearing gradients fills them with zeros."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fill gradients with zeros."""
        super().zero_grad(set_to_none=False)


class SetToNone(MemoryTrick):
    """Nothing to do when on, since the step releases gradients; when off, clearing becomes zeroing."""

    name = "set_to_none"

    def __init__(self, settings: Settings) -> None:
        self.gradients = "released" if settings.enabled else "zeroed"

    def attach(self, run: Run) -> None:
        """When off, swap the classes of networks and optimizers: instances keep their state and can be copied."""
        if self.gradients == "released":
            return
        for module in {id(phase.module): phase.module for phase in run.phases}.values():
            mix_in(module, KeepsModuleGradients)
        for optimizer in dict.fromkeys(run.optimizers.values()):
            mix_in(optimizer, KeepsGradients)


def build(settings: Settings) -> SetToNone:
    """Build the trick."""
    return SetToNone(settings)
