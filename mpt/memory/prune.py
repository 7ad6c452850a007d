"""Remove the hidden channels that matter least and train on, so that a network is really smaller: structured pruning.

The channels are chosen when the network is built, by the weights that `model.weights` gives; `mpt prune RUN` does all
of it and measures. Weights, gradients, optimizer state, activations and time become less, in training and in inference,
and the network computes something else, so this is not exact. Checkpoints and exports hold the narrow network.

`mpt.nn.shared.hidden_channels` says which channels those are; what is concatenated or added keeps its width.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import ClassVar

from pydantic import Field
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.nn.shared.hidden_channels import narrow
from mpt.seams import HoldsWeights, Run

RELIEVES = "weights"
LOSSY = True


class Settings(Options):
    """How much is kept, and of which networks."""

    shorthand: ClassVar[str | None] = "share"

    share: float = Field(0.5, gt=0, lt=1)
    """The share of hidden channels that is kept, a multiple of 4 in each group."""
    networks: list[str] = Field(default_factory=lambda: ["*"])
    """Globs over the names of networks: a GAN's generator is gen."""


class Prune(HoldsWeights):
    """Narrows networks when they are built; nothing else."""

    name, exact = "prune", False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.removed: dict[str, int] = {}

    def pack_weights(self, networks: Mapping[str, nn.Module]) -> None:
        """Narrow the chosen networks. Raises ConfigError if there is nothing to remove."""
        with unset_fake_temporarily():
            for name, network in networks.items():
                if any(fnmatchcase(name, glob) for glob in self.settings.networks):
                    self.removed[name] = narrow(network, self.settings.share)
        if not any(self.removed.values()):
            raise ConfigError(
                f"memory.prune: no hidden channels to remove in {', '.join(networks)}; they are found between layers "
                "of an nn.Sequential, and where a module has a method `hidden_channels`"
            )

    def attach(self, run: Run) -> None:
        """Log what was removed."""
        gone = ", ".join(f"{count} of {name}" for name, count in self.removed.items() if count)
        run.messages.append(f"memory.prune: hidden channels removed: {gone}")


def build(settings: Settings) -> Prune:
    """Build the trick."""
    return Prune(settings)
