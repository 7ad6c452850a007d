"""Figures that a task or a network logs while it trains: a name and a tensor, read when a line is written.

`log("margin", gap)` in a phase's losses, or in a network's forward, adds up the tensor's elements on the device; the
line in metrics.jsonl has their mean since the line before, over samples, micro-batches and ranks, as
"logged": {"PHASE/margin": ...}. Nothing waits for the device in between.

Values of an update's forward are logged. A call elsewhere does nothing: in an evaluation, in a forward that
`memory.recompute` repeats, in a network that `memory.compile` has compiled. Named in `mpt.seams` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from mpt.errors import PartError
from mpt.parallel.local import local


class Figures:
    """The figures of one update: sums on the device and how many elements they are of."""

    open: Figures | None = None
    """The one that takes logged values now: `mpt.seams.phase_losses` sets it around a forward, of which one runs at a
    time."""

    sums: Mapping[str, Tensor] = MappingProxyType({})
    counts: Mapping[str, int] = MappingProxyType({})

    def add(self, name: str, value: Tensor) -> None:
        """Add a tensor's elements."""
        own = local(value.detach())
        total = own.sum(dtype=torch.float32)  # a copy too: a logged value may be changed in place
        summed = self.sums[name] + total if name in self.sums else total
        self.sums = {**self.sums, name: summed}
        self.counts = {**self.counts, name: self.counts.get(name, 0) + own.numel()}


def log(name: str, value: Tensor | float) -> None:
    """Log the mean of a tensor of any shape, or a number, by name. PartError for anything else."""
    if torch.compiler.is_compiling() or Figures.open is None:
        return
    if isinstance(value, Tensor):
        Figures.open.add(name, value)
    elif isinstance(value, int | float):
        Figures.open.add(name, torch.tensor(float(value)))
    else:
        raise PartError(
            f"log({name!r}, ...): expected a tensor or a number, found {type(value).__name__}"
        )
