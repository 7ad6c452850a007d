"""The resumable order of the samples, and the batches in that order.

A step's batch is a pure function of (seed, step): the step gives the epoch and the place in it, (seed, epoch) give the
permutation. So a resumed run needs no state but its step, and any number of workers delivers the same batches. With no
workers there is nothing between the training and `Dataset.fetch`; with workers the stream runs on over the ends of the
epochs, so nothing is restarted there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch

from mpt import accelerator
from mpt.data.loading.balance import balanced_order
from mpt.data.loading.checks import fetch
from mpt.data.loading.groups import cut, grouped_order
from mpt.data.loading.workers import WorkerPool
from mpt.data.pictures.seeds import mix
from mpt.errors import DataError
from mpt.seams import Batch, Dataset, DataSpec

BATCHES_AHEAD_PER_WORKER = 2


class Loader:
    """Batches of a data set by step. Raises DataError if there are too few samples to make one."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int,
        workers: int = 0,
        drop_last: bool = True,
        shuffle: bool = True,
        pin_memory: bool = False,
        timeout_seconds: float = 60.0,
        place: Callable[[int], tuple[int, int]] | None = None,
        sampling: Literal["shuffle", "balanced"] = "shuffle",
    ) -> None:
        """`place` gives the range of this process's part of that many samples, if others have the rest.

        `sampling` is `dataset.sampling`, for loaders that shuffle.
        """
        assert batch_size > 0
        if len(dataset) == 0:
            raise DataError("the data set is empty: check dataset.root and the split")
        if drop_last and len(dataset) < batch_size:
            raise DataError(
                f"the data set has {len(dataset)} samples, fewer than one batch of train.batch_size={batch_size}; "
                f"set train.batch_size to {len(dataset)} or less"
            )
        self.dataset, self.batch_size, self.seed, self.workers = dataset, batch_size, seed, workers
        self.shuffle, self.timeout_seconds, self.place = shuffle, timeout_seconds, place
        self.labels = dataset.class_labels() if sampling == "balanced" else None
        """The classes to balance, or None."""
        if sampling == "balanced" and self.labels is None:
            raise DataError(
                "dataset.sampling=balanced: this data set has no classes that are known without reading its samples"
            )
        self.pin_memory = pin_memory and accelerator.available() is not None
        self.groups = dataset.groups()
        if self.groups is not None and self.labels is not None:
            raise DataError(
                "dataset.sampling=balanced: this data set's samples have several sizes, which it cannot mix"
            )
        full, rest = divmod(len(dataset), batch_size)
        self.steps_per_epoch = full + (not drop_last and rest > 0)
        self.cuts: list[range] = []
        """The batches in the data set's own order, of a loader that does not shuffle."""
        if self.groups is not None or not shuffle:
            self.cuts = cut(len(dataset), self.groups, batch_size)
        if self.groups is not None:
            self.steps_per_epoch = len(self.cuts)
        self.latest: tuple[int, list[int]] = (-1, [])

    def order(self, epoch: int) -> list[int]:
        """Return the order of all samples in an epoch of a loader that shuffles."""
        if self.latest[0] != epoch:
            count, generator = (
                len(self.dataset),
                torch.Generator().manual_seed(mix(self.seed, epoch)),
            )
            if self.labels is not None:
                order = balanced_order(self.labels, generator)
            elif self.groups is not None:
                order = grouped_order(self.groups, self.batch_size, generator)
            else:
                order = torch.randperm(count, generator=generator).tolist()
            self.latest = (epoch, order)
        return self.latest[1]

    def indices(self, step: int) -> tuple[list[int], int]:
        """Return the samples of a step's batch, or of this process's part of it, and the epoch.

        With balanced classes the step in place of the epoch: a sample that comes again in the same epoch is augmented
        in another way.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch_size
        batch = (
            self.order(epoch)[first : first + self.batch_size]
            if self.shuffle
            else list(self.cuts[place])
        )
        if self.place is not None:
            start, stop = self.place(len(batch))
            batch = batch[start:stop]
        return batch, epoch if self.labels is None else step

    def looks_at(self, step: int) -> bool:
        """Return whether a step may have samples that no epoch had before, and that may be bad."""
        if self.dataset.is_sound:
            return False
        return step < self.steps_per_epoch or self.labels is not None

    def batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Yield the batch of step `start_step`, then of each step after it, without end. On the CPU, pinned if
        asked.
        """
        assert start_step >= 0
        steps = itertools.count(start_step)
        stream = self._from_workers(steps) if self.workers else self._in_process(steps)
        return map(pin, stream) if self.pin_memory else stream

    def evaluation_batches(
        self, first: int = 0, every: int = 1, *, is_even: bool = False
    ) -> Iterator[Batch]:
        """Yield every sample once, in the data set's own order; the last batch may be smaller.

        Of the batches from number `first` on, each `every`-th, if processes share them out; `is_even` gives all of
        them as many, with the last batch again if there is no other.
        """
        plain = Loader(
            self.dataset,
            self.batch_size,
            self.seed,
            self.workers,
            drop_last=False,
            shuffle=False,
            timeout_seconds=self.timeout_seconds,
        )
        last = plain.steps_per_epoch - 1
        end = -(-plain.steps_per_epoch // every) * every if is_even else plain.steps_per_epoch
        numbers = (min(number, last) for number in range(first, end, every))
        stream = plain._from_workers(numbers) if self.workers else plain._in_process(numbers)
        return map(pin, stream) if self.pin_memory else stream

    def _in_process(self, steps: Iterator[int]) -> Iterator[Batch]:
        if self.dataset.is_sound:
            return (self.dataset.fetch(*self.indices(step)) for step in steps)
        return (fetch(self.dataset, *self.indices(step), self.looks_at(step)) for step in steps)

    def _from_workers(self, steps: Iterator[int]) -> Iterator[Batch]:
        with WorkerPool(self.dataset, self.workers, self.timeout_seconds) as pool:
            asked = 0
            while True:
                for step in itertools.islice(
                    steps, self.workers * BATCHES_AHEAD_PER_WORKER - asked
                ):
                    pool.send(*self.indices(step), self.looks_at(step))
                    asked += 1
                if not asked:
                    return
                yield pool.receive()
                asked -= 1


def pin(batch: Batch) -> Batch:
    """Return a batch in page-locked memory, from which copies to a GPU can run during the computation."""
    return {name: tensor.pin_memory() for name, tensor in batch.items()}


def to_device(batch: Batch, device: torch.device | str, spec: DataSpec) -> Batch:
    """Return a batch on a device, as a task sees it; from pinned memory without waiting for the copy.

    Images that a data set delivers as uint8 cross as such and become float32 there.
    """
    return spec.as_floats(
        {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    )


def prefetch(batches: Iterable[Batch], device: torch.device, spec: DataSpec) -> Iterator[Batch]:
    """Yield batches on a device, as a task sees them."""
    if accelerator.has_allocator(device):
        return copied_ahead(batches, device, spec)
    if device.type == "cpu":  # they are there already
        return map(spec.as_floats, batches)
    return (to_device(batch, device, spec) for batch in batches)


def copied_ahead(batches: Iterable[Batch], device: torch.device, spec: DataSpec) -> Iterator[Batch]:
    """Yield batches on a GPU. Each is copied and converted on a stream of its own while the one before it is used."""
    copying = torch.Stream(device)
    ahead: tuple[Batch, torch.Event] | None = None
    for batch in batches:
        with copying:
            following = (to_device(batch, device, spec), copying.record_event())
        if ahead is not None:
            yield arrived(*ahead)
        ahead = following
    if ahead is not None:
        yield arrived(*ahead)


def arrived(batch: Batch, copied: torch.Event) -> Batch:
    """Make the current stream wait for a copy, and keep the allocator from reusing the batch's memory too early."""
    current = torch.accelerator.current_stream(next(iter(batch.values())).device)
    current.wait_event(copied)
    for tensor in batch.values():
        tensor.record_stream(current)
    return batch
