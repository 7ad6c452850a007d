"""The micro-batches of one effective batch, and the weights with which their gradients add up to the whole batch's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mpt.parallel.exchange import Exchange
from mpt.seams import Batch, Loss


def split(
    batch: Batch, micro_batch_size: int | None, whole: int | None = None
) -> Iterable[tuple[Batch, float]]:
    """Return micro-batches, the last one possibly smaller, each with its share of the samples.

    `whole` is the number of samples that shares are of, if this batch is a rank's part of them.
    """
    if micro_batch_size is None and whole is None:
        return ((batch, 1.0),)
    count = size_of(batch)
    if micro_batch_size is None or micro_batch_size >= count:
        return ((batch, count / whole if whole else 1.0),)
    return parts_of(batch, count, micro_batch_size, whole or count)


def parts_of(batch: Batch, count: int, size: int, whole: int) -> Iterator[tuple[Batch, float]]:
    """Yield parts of that many samples of a batch of `count`, each with its share of `whole`."""
    for start in range(0, count, size):
        part = {name: value[start : start + size] for name, value in batch.items()}
        yield part, min(size, count - start) / whole


def size_of(batch: Batch) -> int:
    """Return the number of samples."""
    return next(iter(batch.values())).shape[0]


def weigh(losses: Iterable[Loss], share: float) -> list[Tensor]:
    """Return losses of a micro-batch, with this share of the samples, as they are to be back-propagated."""
    values = []
    for loss in losses:
        is_whole = share == 1.0 or loss.reduction == "sum"
        values.append(loss.value if is_whole else loss.value * share)
    return values


class Normaliser:
    """Divides the losses of a `normalised` phase by the batch's total weight, by one divisor on all ranks.

    Ranks agree on the weight of their first parts before any backward: sharded gradients and synchronised BatchNorm
    mix what ranks have in the backward itself, and a factor of each rank's own would come too late. If each rank has
    one part, that is the total. With several the total is known after the last forward alone; losses are then divided
    by the batch's weight if it continues like its first parts, so that gradients have about their final size, in half
    precision's range too, and one factor for all gradients follows.
    """

    def __init__(self, least_weight: float, samples: int, exchange: Exchange | None) -> None:
        self.least_weight, self.exchange = least_weight, exchange
        self.samples = samples
        """Of the whole batch, which ranks share."""
        self.part = 0
        self.in_part = 0
        self.divisor: Tensor | None = None
        self.weights: list[Tensor] = []

    def begin_part(self, samples: int) -> None:
        """Take the next loss's weight for that of a new part."""
        self.part += 1
        self.in_part = samples

    def scale(self, loss: Loss) -> Tensor:
        """Return a loss of the current part as it is to be back-propagated."""
        if len(self.weights) < self.part:
            weight = torch.as_tensor(loss.weight, device=loss.value.device).detach()
            self.weights.append(weight.to(torch.promote_types(weight.dtype, torch.float32)))
        if self.divisor is None:
            self.divisor = self.first_divisor()
        return loss.value / self.divisor

    def first_divisor(self) -> Tensor:
        """Return the batch's weight, as estimated from the first part of each rank."""
        weight = self.weights[0]
        if self.exchange is None:
            if self.in_part == self.samples:
                return weight.clamp_min(self.least_weight)
            expected = weight * (self.samples / self.in_part)
        else:
            weight, samples = self.exchange.add_weight(weight, self.in_part)
            if not self.exchange.awaits_weights:
                return weight.clamp_min(self.least_weight)
            expected = weight * (self.samples / samples)
        return torch.where(expected > self.least_weight, expected, float(self.samples))

    def correction(self) -> Tensor | None:
        """Return the factor of all gradients after the last part; None if they are as they should be.

        On ranks, all that have weights must ask.
        """
        if not self.weights:
            return None
        if self.exchange is None:
            if self.part <= 1:
                return None
            total = torch.stack(self.weights).sum()
        elif self.exchange.awaits_weights:
            total, _ = self.exchange.add_weight(torch.stack(self.weights).sum(), self.samples)
        else:
            return None
        assert self.divisor is not None
        return self.divisor / total.clamp_min(self.least_weight)
