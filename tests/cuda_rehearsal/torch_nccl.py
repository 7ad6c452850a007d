"""NCCL for pretend cards: a process group of torch's that sends over gloo and asks of its callers what NCCL asks.

- It takes contiguous tensors of its rank's own card alone, as NCCL does.
- Given `device_id`, it connects in `init_process_group`, and two ranks on one card are an error.
- It works on a stream of its own, behind the caller's. `wait()` lets the caller's stream wait and not the host, so that
  a missing `wait()` is a race.
- Its sums are gloo's, which repeat; NCCL's order is not modelled.

The pretend card's memory is the process's own, so that bytes go to gloo and back without the host's waiting for a
stream, which would order work that NCCL leaves unordered.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

VERSION = (2 << 32) | (28 << 16) | 9
OPENED: list[tuple[int, torch.device | None]] = []
"""The rank and the card, if one was named, of each group that was opened in this process."""


class Options:
    """What torch sets before it opens a group."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self._timeout = timedelta(minutes=10)


class Collective:
    """One collective that is under way."""

    def __init__(
        self, group: ProcessGroupNCCL, sent: Any, outputs: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self.group, self.sent, self.outputs = group, sent, outputs
        self.done: Any = None

    def wait(self, timeout: Any = None) -> bool:
        """Let the caller's stream wait for the collective's result."""
        stream = self.group.stream
        if self.done is None:
            self.sent.wait()
            with stream:
                for tensor, host in self.outputs:
                    page_locked = torch.empty_like(host, pin_memory=True)
                    copy_bytes(page_locked, host)
                    tensor.copy_(page_locked.view(tensor.shape), non_blocking=True)
            self.done = stream.record_event()
            self.outputs = ()
        torch.accelerator.current_stream(stream.device).wait_event(self.done)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Return whether the result is there, which is known only behind a wait."""
        return self.done is not None


class ProcessGroupNCCL(dist.ProcessGroup):
    """The group of one rank."""

    Options = Options
    supports_splitting = True

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self.store, self.number, self.count = store, rank, size
        self.card: torch.device | None = None
        self.takes_host_tensors = False
        """Whether the group was opened as "cpu:gloo,cuda:nccl"."""
        self.streams: dict[torch.device, torch.Stream] = {}
        self.gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", store), rank, size, options._timeout
        )
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(torch.device("cpu"), kind, self.gloo)  # torch asks it for hooks
        self._set_default_backend(kind)
        OPENED.append((rank, None))

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_backend(self, device: torch.device) -> Any:
        return self if torch.device(device).type == "cuda" else self.gloo

    def _get_backend_name(self) -> str:
        return "nccl"

    getBackendName = _get_backend_name

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Meet the other ranks, each with a card of its own."""
        self.card = self.bound_device_id = device
        OPENED[-1] = (self.number, device)
        place = (
            f"{socket.gethostname()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device.index}"
        )
        self.store.set(f"card/{self.number}", place)
        for rank in range(self.count):
            if rank != self.number and self.store.get(f"card/{rank}").decode() == place:
                raise dist.DistBackendError(
                    f"ncclInvalidUsage: Duplicate GPU detected : rank {self.number} and rank {rank} both on {device}"
                )

    @property
    def stream(self) -> torch.Stream:
        """The stream that collectives work on: one for each card, not the caller's."""
        card = self.card or torch.device("cuda", torch.cuda.current_device())
        if card not in self.streams:
            self.streams[card] = torch.Stream(card)
        return self.streams[card]

    def start(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], send: Callable[..., Any]
    ) -> Collective:
        """Begin a collective behind the caller's stream; `send` gets the bytes of both on the host."""
        for tensor in (*inputs, *outputs):
            self.refuse(tensor)
        stream, on_host = self.stream, {}
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        for tensor in outputs:
            on_host[tensor.data_ptr()] = torch.empty(tensor.shape, dtype=tensor.dtype)
        with stream:
            for tensor in inputs:
                page_locked = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                page_locked.copy_(tensor, non_blocking=True)
                host = on_host.setdefault(
                    tensor.data_ptr(), torch.empty(tensor.shape, dtype=tensor.dtype)
                )
                copy_bytes(host, page_locked)
        sent = send(
            [on_host[t.data_ptr()] for t in inputs], [on_host[t.data_ptr()] for t in outputs]
        )
        return Collective(self, sent, [(tensor, on_host[tensor.data_ptr()]) for tensor in outputs])

    def refuse(self, tensor: Tensor) -> None:
        """Raise RuntimeError for a tensor that NCCL does not take."""
        if tensor.device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        if self.card is not None and tensor.device != self.card:
            raise RuntimeError(
                f"Tensor found on device {tensor.device} but backend constrained to {self.card}"
            )
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")

    def over_gloo(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a group of both kinds leaves these to gloo."""
        return self.takes_host_tensors and all(tensor.device.type == "cpu" for tensor in tensors)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Sum tensors in place, or take their mean."""
        opts = opts or dist.AllreduceOptions()
        if self.over_gloo(tensors):
            return self.gloo.allreduce(tensors, opts)
        is_mean = opts.reduceOp == dist.ReduceOp.AVG

        def send(inputs: list[Tensor], outputs: list[Tensor]) -> Any:
            wanted = dist.AllreduceOptions()
            wanted.reduceOp = dist.ReduceOp.SUM if is_mean else opts.reduceOp
            work = self.gloo.allreduce(outputs, wanted)

            def wait() -> None:
                work.wait()
                for output in outputs if is_mean else ():
                    output.div_(self.count)

            return SimpleNamespace(wait=wait)

        return self.start(tensors, tensors, send)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Spread one rank's tensors."""
        if self.over_gloo(tensors):
            return self.gloo.broadcast(tensors, opts)
        return self.start(
            tensors, tensors, lambda inputs, outputs: self.gloo.broadcast(outputs, opts)
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather one tensor of each rank."""
        if self.over_gloo(inputs):
            return self.gloo.allgather(outputs, inputs)
        return self.start(inputs, outputs[0], lambda ins, outs: self.gloo.allgather([outs], ins))

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        """Gather into one tensor."""
        return self.allgather([list(output.view(-1).chunk(self.count))], [given.view(-1)])

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> Any:
        """Sum, and keep this rank's part."""
        whole = given.clone()
        work = self.allreduce([whole], opts)

        def wait() -> bool:
            work.wait()
            output.copy_(whole.view(-1).chunk(self.count)[self.number].view(output.shape))
            return True

        return SimpleNamespace(wait=wait)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def barrier(self, opts: Any = None) -> Any:
        """Let the host wait for all ranks."""
        self.gloo.barrier().wait()
        torch.accelerator.synchronize(self.stream.device)
        return SimpleNamespace(wait=lambda timeout=None: True)

    def shutdown(self) -> None:
        """Leave."""

    abort = shutdown


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy a contiguous tensor's bytes by their address, which orders nothing and is not noted."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def define_functional() -> torch.library.Library:
    """Define the collectives that sharded tensors ask for as operators, which torch's own send natively."""
    works: dict[int, Any] = {}
    reductions = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}

    def group_of(given: Any) -> Any:
        return distributed_c10d._resolve_process_group(given) if isinstance(given, str) else given

    def under_way(output: Tensor, work: Any) -> Tensor:
        works[output.data_ptr()] = work
        return output

    def options_of(reduction: str) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = reductions[reduction]
        return options

    def all_reduce(given: Tensor, reduction: str, group: Any) -> Tensor:
        output = given.clone(memory_format=torch.contiguous_format)
        return under_way(output, group_of(group).allreduce([output], options_of(reduction)))

    def all_gather(given: Tensor, size: int, group: Any) -> Tensor:
        output = given.new_empty((size * given.shape[0], *given.shape[1:]))
        return under_way(output, group_of(group).all_gather_single(output, given.contiguous()))

    def reduce_scatter(given: Tensor, reduction: str, size: int, group: Any) -> Tensor:
        output = given.new_empty((given.shape[0] // size, *given.shape[1:]))
        work = group_of(group).reduce_scatter_single(
            output, given.contiguous(), options_of(reduction)
        )
        return under_way(output, work)

    def wait_tensor(given: Tensor) -> Tensor:
        work = works.pop(given.data_ptr(), None)
        if work is not None:
            work.wait()
        return given

    library = torch.library.Library("_c10d_functional", "IMPL", "CUDA")
    kernels = {"all_reduce": all_reduce, "all_gather_into_tensor": all_gather}
    kernels |= {"reduce_scatter_tensor": reduce_scatter, "wait_tensor": wait_tensor}
    for name, kernel in kernels.items():
        library.impl(name, kernel)
    return library


KEPT: list[torch.library.Library] = []
"""Definitions of operators, which end with their object."""


def install() -> None:
    """Let this process's torch have NCCL. A group of "cpu:gloo,cuda:nccl" takes the host's tensors too."""
    c10d: Any = distributed_c10d
    c10d._NCCL_AVAILABLE, c10d.ProcessGroupNCCL = True, ProcessGroupNCCL
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    torch._C._nccl_version = lambda: VERSION
    torch._C._nccl_version_suffix = lambda: b""
    KEPT.append(define_functional())
    make = c10d._new_process_group_helper

    def open_group(
        size: int, rank: int, ranks: Any, backend: Any, *args: Any, **options: Any
    ) -> Any:
        group, store = make(size, rank, ranks, backend, *args, **options)
        if isinstance(group, ProcessGroupNCCL):
            group.takes_host_tensors = "cpu:gloo" in str(backend)
        return group, store

    c10d._new_process_group_helper = open_group
