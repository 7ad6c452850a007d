"""Processes that fetch batches ahead of the training.

torch's DataLoader is not used because of how it fails: its SIGCHLD handler raises wherever the program happens to be,
in the middle of a checkpoint for instance, and without the handler a dead worker is noticed only after the whole
timeout. Here one place waits for the answer and for every worker's end at once, so a dead worker is named at the next
batch, and a hung one after `timeout_seconds`, which begin when it has started: a spawned worker imports torch first, a
minute's work on a busy machine. Ctrl-C reaches the whole process group: workers ignore it, so that the
run can finish its step and save. A worker whose parent has gone goes too.

Work is dealt out in turn (batch n to worker n modulo count) and collected in the same order. Tensors return through
shared memory.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing

from mpt.data.loading.checks import fetch
from mpt.errors import DataError, MptError
from mpt.outside.own_code import explain_own_code
from mpt.run.process.operating_system import ignore_interrupts, interrupts_held_back
from mpt.seams import Batch, Dataset

STOPPING_SECONDS = 2.0
STARTING_SECONDS = 300.0
"""As long may a worker take until it says that it has started."""


@dataclass
class Worker:
    """One process, the pipe to it, and its open requests."""

    number: int
    process: Any
    pipe: Connection
    pending: deque[list[int]]
    has_started: bool = False


class WorkerPool:
    """A number of processes that hold a copy of the data set each. Close it, or use it in `with`."""

    def __init__(self, dataset: Dataset, count: int, timeout_seconds: float) -> None:
        self.dataset, self.timeout_seconds = dataset, timeout_seconds
        self.workers: list[Worker] = []
        self.sent = self.received = 0
        context = torch.multiprocessing.get_context()
        try:
            for number in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=serve, args=(dataset, theirs), name=f"data-{number}", daemon=True
                )
                with interrupts_held_back():
                    process.start()
                theirs.close()
                self.workers.append(Worker(number, process, ours, deque()))
        except OSError as error:
            self.close()
            raise DataError(
                f"cannot start {count} data workers: {error}; lower dataset.workers"
            ) from error

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def send(self, indices: list[int], epoch: int, looks: bool) -> None:
        """Ask for a batch, at whose samples the worker is to look or not."""
        worker = self.workers[self.sent % len(self.workers)]
        try:
            worker.pipe.send((indices, epoch, looks))
        except OSError as error:
            raise self.dead(worker) from error
        worker.pending.append(indices)
        self.sent += 1

    def receive(self) -> Batch:
        """Return the oldest batch asked for. Raises DataError when its worker failed, and when any died or it hangs."""
        worker = self.workers[self.received % len(self.workers)]
        if not worker.has_started:
            self.answer_of(
                worker, max(STARTING_SECONDS, self.timeout_seconds), "has not started within"
            )
            worker.has_started = True
        answer = self.answer_of(worker, self.timeout_seconds, "gave no batch for")
        worker.pending.popleft()
        self.received += 1
        if isinstance(answer, BaseException):
            raise answer
        batch, bad_files = answer
        if bad_files:
            self.dataset.pass_over(bad_files)
        return dict(batch)

    def answer_of(self, worker: Worker, seconds: float, failing: str) -> Any:
        """Return a worker's next message. Raises DataError when it takes too long, and when any worker died."""
        ready = wait([worker.pipe, *(other.process.sentinel for other in self.workers)], seconds)
        if not ready:
            raise DataError(
                f"data worker {worker.number} (process {worker.process.pid}) {failing} {seconds:g} seconds; it is "
                f"reading the samples {preview(worker.pending[0])}. Check the disk or network the data is on, or set "
                "dataset.workers=0 to see where it hangs"
            )
        if worker.pipe not in ready:
            raise self.dead(
                next(other for other in self.workers if other.process.sentinel in ready)
            )
        try:
            return worker.pipe.recv()
        except (EOFError, OSError) as error:
            raise self.dead(worker) from error

    def dead(self, worker: Worker) -> DataError:
        """Return the error that names a worker that is gone."""
        worker.process.join(1.0)
        code = worker.process.exitcode
        killer = signal.Signals(-code).name if code is not None and code < 0 else ""
        how = f"was killed by {killer}" if killer else f"ended with code {code}"
        hints = {
            "SIGKILL": "out of memory, perhaps",
            "SIGBUS": "shared memory (/dev/shm) is full, perhaps",
        }
        hint = hints.get(killer, "see its output above")
        owing = (
            f" before it delivered the samples {preview(worker.pending[0])}"
            if worker.pending
            else ""
        )
        return DataError(
            f"data worker {worker.number} (process {worker.process.pid}) {how}{owing} ({hint}). "
            "Lower dataset.workers, or set dataset.workers=0 to read in the main process"
        )

    def close(self) -> None:
        """End the workers. They hold nothing that needs saving."""
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            worker.process.join(STOPPING_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()
        self.workers = []


def preview(indices: Sequence[int]) -> str:
    """Return the first few of a list of numbers, for a message."""
    return ", ".join(map(str, indices[:4])) + (", ..." if len(indices) > 4 else "")


def serve(dataset: Dataset, pipe: Connection) -> None:
    """Answer requests until the parent closes the pipe or is gone: the body of a worker process."""
    ignore_interrupts()
    # a forked worker would otherwise run the parent's handler
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # the cores belong to the workers together; and OpenMP's pool does not survive a fork
    torch.set_num_threads(1)
    try:
        pipe.send(None)  # it has started
    except OSError:
        return
    parent = parent_process()
    sentinels = [parent.sentinel] if parent is not None else []
    while pipe in wait([pipe, *sentinels]):
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send(answer_to(dataset, *request))
        except OSError:
            return


def answer_to(
    dataset: Dataset, indices: list[int], epoch: int, looks: bool
) -> tuple[Batch, dict[str, str]] | MptError:
    """Return a batch with the bad files newly met, or the error to raise in the parent."""
    known = set(dataset.bad_files)
    try:
        batch = fetch(dataset, indices, epoch, looks)
    except MptError as error:
        return error
    except Exception as error:  # whatever a data set raises, the parent must hear of it
        told = explain_own_code(error) or traceback.format_exc()
        return DataError(
            f"data worker {os.getpid()} failed on the samples {preview(indices)}:\n{told}"
        )
    return batch, {path: reason for path, reason in dataset.bad_files.items() if path not in known}
