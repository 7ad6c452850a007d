"""The micro-batches of one effective batch, and what makes their gradients add up to the whole batch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from mpt.seams import Batch, Loss


def split(batch: Batch, micro_batch_size: int | None, whole: int | None = None) -> Iterable[tuple[Batch, float]]:
    """Return micro-batches, the last one possibly smaller, each with its share of the samples.

    `whole` is the number of samples that shares are of, where this batch is a rank's part of them.
    """
    if micro_batch_size is None and whole is None:
        return ((batch, 1.0),)
    count = size_of(batch)
    if micro_batch_size is None or micro_batch_size >= count:
        return ((batch, count / whole if whole else 1.0),)
    return parts_of(batch, count, micro_batch_size, whole or count)


def parts_of(batch: Batch, count: int, size: int, whole: int) -> Iterator[tuple[Batch, float]]:
    """Yield parts of so many samples of a batch of `count`, each with its share of `whole`."""
    for start in range(0, count, size):
        part = {name: value[start : start + size] for name, value in batch.items()}
        yield part, min(size, count - start) / whole


def size_of(batch: Batch) -> int:
    """Return the number of samples."""
    return next(iter(batch.values())).shape[0]


class Normaliser:
    """Divides the losses of a `normalised` phase by the batch's total weight, which is known after the last part.

    Each part is divided by the first part's weight, so that gradients have their final size but for a factor, and stay
    in half precision's range; the factor follows. A batch in one part needs none.
    """

    def __init__(self, least_weight: float) -> None:
        self.least_weight = least_weight
        self.parts = 0
        self.weights: list[Tensor] = []

    def begin_part(self) -> None:
        """Take the next loss's weight for that of a new part."""
        self.parts += 1

    def scale(self, loss: Loss) -> Tensor:
        """Return a loss of the current part as it is to be back-propagated."""
        assert loss.weight is not None, f"loss {loss.name!r}: a normalised phase yields losses with their weight"
        if len(self.weights) < self.parts:
            weight = torch.as_tensor(loss.weight, device=loss.value.device).detach()
            self.weights.append(weight.to(torch.promote_types(weight.dtype, torch.float32)))
        return loss.value / self.weights[0].clamp_min(self.least_weight)

    def correction(self, add: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return what the gradients of all parts together are to be multiplied by; `add` sums over ranks."""
        total = torch.stack(self.weights).sum()
        total = (total if add is None else add(total)).clamp_min(self.least_weight)
        return self.weights[0].clamp_min(self.least_weight) / total
