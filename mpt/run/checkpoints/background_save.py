"""Checkpoints that are written during the training, which waits for a copy of its state and not for the disk.

The copy lies in one block of host memory that is kept from save to save: mapping fresh memory would cost more than
the copy. On a GPU's machine it is pinned, so that the copies of all tensors are queued and waited for once. Hashing,
writing, syncing and removing old checkpoints happen in a thread, in the order in which they always do, so a kill at
any moment has the same effect as without this. One checkpoint is written at a time: the next save waits for the one
before. A failure is raised by the next `finish`, in the thread that trains.

The thread lives as long as one checkpoint is being written. Processes are not to be forked meanwhile.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpt.run.checkpoints.checkpoint import EncodedState
from mpt.run.process.host_memory import available_bytes

ALIGNMENT = 64
"""Bytes between which copies begin, so that any dtype may view them."""
LARGEST_SHARE = 0.5
"""Of the memory that is available, how much a copy may take if nobody asked for it."""


class BackgroundSave:
    """Writes one encoded state at a time. With `beside=None` it copies if memory has room; False never does."""

    def __init__(self, beside: bool | None) -> None:
        self.beside = beside
        self.newest: int | None = None
        """The step of the newest checkpoint that was written to its end."""
        self.copies = HostCopies()
        self.saves = 0
        """How many checkpoints several processes have begun to write together."""
        self.writing: Writing | None = None

    def start(
        self, step: int, state: EncodedState, write: Callable[[EncodedState], object]
    ) -> None:
        """Let `write` store a state, in a thread if there is room for a copy of it. Raises the errors of `finish`."""
        self.finish()
        tensors = (
            self.copies.of(state.tensors, state.tensor_bytes, self.beside)
            if self.beside is not False
            else None
        )
        if tensors is None:
            write(state)
            self.newest = step
            return
        held = EncodedState(state.structure, tensors)
        self.write(step, lambda: write(held))

    def write(self, step: int, work: Callable[[], object]) -> None:
        """Let `work` write a checkpoint in a thread. The one before must be finished."""
        assert self.writing is None, "one checkpoint is written at a time"
        self.writing = Writing(step, work)
        self.writing.start()

    @property
    def is_writing(self) -> bool:
        """Is a checkpoint being written?"""
        return self.writing is not None and self.writing.is_alive()

    @property
    def is_written(self) -> bool:
        """Is there a checkpoint whose writing has ended, well or not, and that `finish` has not been told of?"""
        return self.writing is not None and not self.writing.is_alive()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Raises InputOutputError if it could not be."""
        writing = self.writing
        if writing is None:
            return
        writing.join()
        self.writing = None
        if writing.error is not None:
            raise writing.error
        self.newest = writing.step


class Writing(threading.Thread):
    """One checkpoint on its way to the disk. Not a daemon: a program that ends waits for it."""

    def __init__(self, step: int, work: Callable[[], object]) -> None:
        super().__init__(name=f"checkpoint-{step}")
        self.step, self.work = step, work
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do the work and keep its exception."""
        try:
            self.work()
        except BaseException as error:
            self.error = error


class HostCopies:
    """Copies of tensors in one block of host memory, which is kept and grows when it must."""

    def __init__(self) -> None:
        self.block = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def of(
        self, tensors: Mapping[str, Tensor], tensor_bytes: int, wanted: bool | None
    ) -> dict[str, Tensor] | None:
        """Return contiguous copies, which stay as they are until the next call; None if there is no room.

        Unless they are `wanted`, they may take a share of the memory that is available, which must be known.
        """
        needed = tensor_bytes + ALIGNMENT * len(tensors)
        if self.block.numel() < needed:
            # given back first: both together may not fit
            self.block = torch.empty(0, dtype=torch.uint8)
            available = available_bytes()
            if not wanted and (available is None or needed > LARGEST_SHARE * available):
                return None
            try:
                self.block = new_block(
                    needed, pinned=any(tensor.is_cuda for tensor in tensors.values())
                )
            except RuntimeError:  # out of memory
                return None
        copies, begin, is_pinned = (
            {},
            0,
            any(tensor.is_cuda for tensor in tensors.values()) and self.block.is_pinned(),
        )
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            copy = self.block[begin : begin + size].view(tensor.dtype).view(tensor.shape)
            copies[name] = copy.copy_(tensor, non_blocking=tensor.is_cuda and is_pinned)
            begin += -(-size // ALIGNMENT) * ALIGNMENT
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.accelerator.current_stream(device).synchronize()
        return copies


def new_block(size: int, pinned: bool) -> Tensor:
    """Return a block of host memory. Raises RuntimeError if there is none.

    A pinned one is registered with the driver in place: torch's own pinned memory would be rounded up to a power of
    two. If the driver refuses, the block is ordinary memory, and copies to it wait one by one.
    """
    block = torch.empty(size, dtype=torch.uint8)
    if pinned and size:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostRegister(block.data_ptr(), size, 0)
        weakref.finalize(block, runtime.cudaHostUnregister, block.data_ptr())
    return block
