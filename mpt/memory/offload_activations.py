"""Keep large activations in host memory between forward and backward.

Tensors that autograd saves above a size are copied out as they are saved and copied back when backward asks for it;
gradients are bit-equal. On CUDA the host memory is pinned and both copies run on a stream of their own: the way out
overlaps the forward, and while backward works on one tensor the one it will want next is on its way in, into memory of
the computing stream that is free once this has come so far: a stream's pool of its own would keep all memory that it
was once given. Weights stay on the card, and a tensor that is saved twice is copied once. On a CPU there is nowhere to
go, and nothing is done.

A card computes faster than the bus carries (360 against 12 GB/s on an RTX 3060), so the forward waits for it: while
`IN_FLIGHT` copies are under way, the computing stream waits for the oldest before the next may begin. Without a bound
the tensors of a whole forward would be on the device again, each waiting for its copy.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from mpt.accelerator import copies_beside
from mpt.config.options import Options
from mpt.memory.travelling.host_blocks import HostBlocks
from mpt.seams import MemoryTrick, Phase, Precision, Task

CONFLICTS = {
    "compile": "compiled graphs save tensors without asking; use recompute or compile alone"
}
RELIEVES = "activations"
SHARDED = True
PROPOSALS = (True,)
DIALS = ({"at_most_gib": ("activations", 0.0)},)
LADDER = 1.0
RANK = 2
IN_PARTS = False
"""In micro-batches most tensors are below `min_mebibytes`."""
POINTLESS_ON = {"cpu": "activations are in host memory already"}
FETCH_AHEAD = 2
IN_FLIGHT = 2
"""Copies to the host that may be under way at once: one that the bus is at, and the next."""


class Settings(Options):
    """The size above which activations are offloaded."""

    shorthand: ClassVar[str | None] = "min_mebibytes"

    min_mebibytes: float = Field(1.0, ge=0)
    """Smaller activations stay: a copy has a fixed cost, and many small ones save little."""
    at_most_gib: float | None = Field(None, ge=0)
    """GiB of one forward that wait on the host, the first ones, which backward wants last. null sends all of them."""


class Offloaded:
    """A saved tensor in host memory, and the way back."""

    def __init__(self, tensor: Tensor, stream: Any, blocks: HostBlocks) -> None:
        self.device, self.stream, self.blocks = tensor.device, stream, blocks
        self.fetched: weakref.ref[Tensor] | None = None
        self.incoming: tuple[Tensor, Any] | None = None
        self.left: Any = None
        """The event after which the tensor is on the host; None if that is so at once."""
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        blocks.take(self.host.nbytes)
        if stream is None:
            self.host.copy_(tensor)
            return
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            self.host.copy_(tensor, non_blocking=True)
            self.left = stream.record_event()

    def start(self) -> None:
        """Begin the copy back, during the computation."""
        if self.incoming is not None or (self.fetched is not None and self.fetched() is not None):
            return
        if self.stream is None:
            # a plan counts the copies that a GPU would have in flight
            if torch._guards.detect_fake_mode() is not None:
                self.incoming = (self.host.to(self.device), None)
            return
        arriving = torch.empty_like(self.host, device=self.device)
        # which may still use that memory
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            arriving.copy_(self.host, non_blocking=True)
            self.incoming = (arriving, self.stream.record_event())

    def finish(self) -> Tensor:
        """Return the tensor on its device."""
        there = self.fetched() if self.fetched is not None else None
        if there is not None:
            return there
        self.start()
        if self.incoming is None:
            result = self.host.to(self.device)
        else:
            result, arrived = self.incoming
            self.incoming = None
        if self.stream is not None:
            torch.accelerator.current_stream(self.device).wait_event(arrived)
        self.fetched = weakref.ref(result)
        return result

    def __del__(self) -> None:
        if not hasattr(self, "host"):  # there was no memory for it
            return
        self.blocks.give_back(self.host.nbytes)
        # A backward that failed leaves copies in flight: nothing may use its memory before the copy is done.
        if self.incoming is not None and self.incoming[1] is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.incoming[1])


class OffloadActivations(MemoryTrick):
    """Gives autograd's saved tensors a place on the host."""

    name = "offload_activations"

    def __init__(self, settings: Settings) -> None:
        self.min_bytes = int(settings.min_mebibytes * 2**20)
        self.most_bytes = math.inf if settings.at_most_gib is None else settings.at_most_gib * 2**30
        self.sent_bytes = 0
        self.task: Task | None = None
        self.streams: dict[torch.device, Any] = {}
        self.saved: list[weakref.ref[Offloaded]] = []
        self.known: dict[int, list[tuple[StorageWeakRef, Any, weakref.ref[Offloaded]]]] = {}
        self.leaving: deque[tuple[Tensor, Any]] = deque()
        """Tensors whose copies may be under way, kept until the computing stream has waited for that."""
        self.blocks = HostBlocks()

    @property
    def host_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the pinned blocks that hold activations."""
        return self.blocks.bytes

    def apply(self, task: Task, precision: Precision) -> None:
        """Remember the task, whose weights stay."""
        self.task = task

    def forward(self) -> AbstractContextManager[Any]:
        """Return the hooks of one forward; its tensors have a list of their own."""
        self.saved, self.known, self.sent_bytes = [], {}, 0
        self.let_go()
        self.weights = {
            p.untyped_storage()._cdata
            for module in (self.task.modules.values() if self.task else ())
            for p in module.parameters()
        }
        return saved_tensors_hooks(self.pack, self.unpack)

    def is_offloaded(self, tensor: Tensor) -> bool:
        """Return whether a tensor is to be copied to the host."""
        return (
            tensor.device.type not in POINTLESS_ON
            and tensor.nbytes >= max(self.min_bytes, 1)
            # an expanded tensor would grow on the way
            and tensor.nbytes <= tensor.untyped_storage().nbytes()
            and tensor.untyped_storage()._cdata not in self.weights
            and not (tensor.is_leaf and tensor.requires_grad)
            and not isinstance(tensor._base, nn.Parameter)  # of sharded networks, a gathered weight
        )

    def pack(self, tensor: Tensor) -> Any:
        """Copy a saved tensor to the host, or keep it."""
        if not self.is_offloaded(tensor):
            # Not the tensor itself: a graph that holds its own output and is never walked would not be freed.
            return tensor.detach()
        storage = tensor.untyped_storage()
        layout = (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor._version,
        )
        for owner, same, reference in self.known.get(storage._cdata, []):
            record = reference()
            if same == layout and record is not None and not owner.expired():  # type: ignore[no-untyped-call]
                return self.packed(record)
        if self.sent_bytes + tensor.nbytes > self.most_bytes:
            return tensor.detach()
        self.sent_bytes += tensor.nbytes
        record = Offloaded(tensor, self.stream(tensor.device), self.blocks)
        self.leaving.append((tensor.detach(), record.left))
        self.let_go(IN_FLIGHT)
        owner = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.known.setdefault(storage._cdata, []).append((owner, layout, weakref.ref(record)))
        self.saved.append(weakref.ref(record))
        return self.packed(record)

    def let_go(self, kept: int = 0) -> None:
        """Release tensors but the newest that many; the computing stream waits for their copies."""
        while len(self.leaving) > kept:
            tensor, left = self.leaving.popleft()
            if left is not None:
                torch.accelerator.current_stream(tensor.device).wait_event(left)

    def abandon(self, phase: Phase) -> None:
        """Release the copies in flight of a forward that failed."""
        self.let_go()

    def packed(self, record: Offloaded) -> Any:
        """Return autograd's saved object: the record, and the list with its neighbours."""
        return record, self.saved, len(self.saved) - 1

    def unpack(self, packed: Any) -> Tensor:
        """Bring a tensor back, and start its predecessors on their way: backward walks in reverse."""
        if isinstance(packed, Tensor):
            return packed
        record, saved, position = packed
        self.let_go()
        result: Tensor = record.finish()
        for reference in saved[max(0, position - FETCH_AHEAD) : position]:
            earlier = reference()
            if earlier is not None:
                earlier.start()
        return result

    def stream(self, device: torch.device) -> Any:
        """Return the side stream of a device that has streams; fakes and other devices copy in line."""
        if not copies_beside(device):
            return None
        if device not in self.streams:
            self.streams[device] = torch.Stream(device)
        return self.streams[device]


def build(settings: Settings) -> OffloadActivations:
    """Build the trick."""
    return OffloadActivations(settings)
