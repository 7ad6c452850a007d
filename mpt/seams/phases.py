"""An optimizer update: its losses, the phase of a step that it belongs to, and its outcome.

Named in `mpt.seams` too, which is the module for a part to import from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.seams.samples import Batch

NOTHING = nullcontext()
"""A context that does nothing, which is cheaper not to make anew."""


class Loss(NamedTuple):
    """One scalar to back-propagate, and the name that it is logged by.

    `reduction` says how the batch was reduced, so that micro-batches can be weighted exactly: a mean is weighted by its
    share of the samples, a sum by one. `weight` is for phases that are `normalised`, see there.
    """

    name: str
    value: Tensor
    reduction: Literal["mean", "sum"] = "mean"
    weight: Tensor | float | None = None


@dataclass(frozen=True)
class Phase:
    """One optimizer update within a step: the networks that are trained here, all others frozen meanwhile.

    `name` keys the loss scaler, metrics ("disc/real") and checkpoint entries. `losses(batch)` yields losses one by
    one; each is back-propagated before the next is computed, and its graph is gone by then, which takes the least
    memory. Losses of one forward (two heads of a network) are yielded together, as a tuple, or returned as one: they
    are added up for one backward, and each is logged by its name.

    `every` runs the phase only on steps divisible by it (lazy regularisation, critics), `since` and `until` only from
    that step on and before that step (stages of a training). `scaled=False` exempts the phase from loss scaling
    (second-order penalties diverge under it).

    A loss that is normalised by something else than the number of samples has two ways to be exact in micro-batches:

    - `prepare(batch)` runs once per update on the whole batch, before it is split, and may add the normaliser as a
      field with a value per sample. Losses are then sums over samples of normalised terms (`reduction="sum"`).
    - If the normaliser needs the forward (task-aligned assignment): `normalised=True`. Losses are then
      un-normalised sums, each with `weight`, the part's share of the normaliser as a tensor on the device; all losses
      of a part have the same. The gradient is that of the sums divided by the total weight of the batch, which counts
      as `least_weight` if it is less, as detectors have it (`max(sum, 1)`).
    """

    name: str
    module: nn.Module
    optimizer: Optimizer
    losses: Callable[[Batch], Iterable[Loss | Sequence[Loss]]]
    """Yields losses one after the other, or tuples of losses that share a graph; a tuple that is returned is one."""
    every: int = 1
    scaled: bool = True
    since: int = 0
    until: int | None = None
    prepare: Callable[[Batch], Batch] | None = None
    normalised: bool = False
    least_weight: float = 1.0

    def is_due(self, step: int) -> bool:
        """Does the phase run in this step?"""
        return (
            step % self.every == 0
            and step >= self.since
            and (self.until is None or step < self.until)
        )


@dataclass
class StepStats:
    """The outcome of one phase's update. `grad_norm` stays on the device until it is logged."""

    skipped: bool = False
    scale: float | None = None
    grad_norm: Tensor | None = None
