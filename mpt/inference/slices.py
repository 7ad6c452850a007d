"""Inference in several processes: each makes every n-th batch, and the results are put in order again.

Batches are those of one process, so the results are the same, bit for bit on cards of one kind. There is nothing that
the processes have to agree on, so there is no process group: each opens the run alone, on a card of its own. The
process that asks is the first of them.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import torch

from mpt.engine.state.evaluation import inferring
from mpt.errors import ConfigError, RankError
from mpt.inference.inputs import Sample, sampler_of
from mpt.inference.opening import in_dtype, infer, open_with_inputs
from mpt.inference.trained import Trained
from mpt.run.process.operating_system import ignore_interrupts, interrupts_held_back
from mpt.seams import Inference


@dataclass(frozen=True)
class Work:
    """The request, as every process gets it."""

    samples: Sequence[Sample]
    batch_size: int
    count: int
    numbered: bool = False
    """A generator's samples by their numbers, a batch at a time."""
    truncation: float | None = None
    dtype: str | None = None
    opening: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `open_with_inputs` for the other processes, without the device."""


def infer_all(trained: Trained, work: Work, devices: Sequence[str]) -> list[Inference]:
    """Return the results of all batches in order, made with a process for each of the devices.

    `trained` is on the first device and infers in the dtype that is wanted. Raises RankError if a process was
    lost, and the errors of opening and inference.
    """
    count = len(devices)
    if count == 1:
        return list(batches_of(trained, work, 0, 1))
    # a fork of a process that has used a GPU cannot use one
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count - 1, context, ignore_interrupts) as pool:
        with interrupts_held_back():
            others = [
                pool.submit(infer_part, work, device, rank, count)
                for rank, device in enumerate(devices)
                if rank
            ]
        try:
            parts = [
                list(batches_of(trained, work, 0, count)),
                *(other.result() for other in others),
            ]
        except BrokenProcessPool as error:
            raise RankError(
                "--nproc: a process that made a part of the outputs was lost; had the machine too little memory?"
            ) from error
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # the pool would wait for their parts to be made
            raise
    return [parts[number % count][number // count] for number in range(sum(map(len, parts)))]


def infer_part(work: Work, device: str, rank: int, count: int) -> list[Inference]:
    """Open the run in a process of its own and return the results of its batches."""
    with contextlib.redirect_stderr(io.StringIO()):  # the first process has said it all
        trained, _ = open_with_inputs(**work.opening, device=device)
    return list(batches_of(in_dtype(trained, work.dtype), work, rank, count))


def batches_of(trained: Trained, work: Work, first: int, every: int) -> Iterator[Inference]:
    """Yield the results of each `every`-th batch, from number `first` on, on the host."""
    if not work.numbered:
        yield from infer(trained, work.samples, work.batch_size, work.count, first, every)
        return
    for start in range(first * work.batch_size, work.count, every * work.batch_size):
        with torch.no_grad(), inferring(trained.run):
            tiles = sampler_of(trained.run.task).samples(
                work.count,
                start,
                min(work.batch_size, work.count - start),
                trained.config.seed,
                1.0 if work.truncation is None else work.truncation,
            )
        yield Inference(tiles=tiles.cpu(), outputs=tiles.cpu())


def choose_devices(wanted: str | None, count: int) -> list[str]:
    """Return a device for each of several processes. Raises ConfigError if there are too few."""
    if count == 1:
        return [wanted or "auto"]
    if wanted not in (None, "auto", "cpu", "cuda"):
        raise ConfigError(
            f"--device: found {wanted!r} for {count} processes; use auto, cpu or cuda"
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        # a wish for a card that is not there is refused when the run is opened
        return [wanted or "auto"] * count
    cards = torch.cuda.device_count()
    if cards < count:
        raise ConfigError(
            f"--nproc: found {count} processes for {cards} CUDA device(s); use {cards}, or --device cpu"
        )
    return [f"cuda:{number}" for number in range(count)]
