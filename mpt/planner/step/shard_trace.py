"""Support for torch's FSDP2 on fake tensors, and for a recorder that follows it.

`fully_shard` itself is traced, not a formula of it. It asks for streams and events of its device, which are numbers
here: allocations remember the stream that they were made on, since each has pools of its own in the allocator, and the
order of waits gives the time (`mpt.planner.trace.overlap`). Its collectives go to torch's fake process group, which
leaves tensors as they are; in torch 2.13 it is registered for cpu, cuda, hpu and xpu only, and a FakeProcessGroup that
is made directly is not dispatched to (pytorch#162129), so the fake device is added to its list.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh

from mpt.planner.device.fake_device import DEVICE, register
from mpt.planner.trace.overlap import OrderedWork
from mpt.planner.trace.recorder import Recorder

FIRST = 2
"""The number of the first stream of FSDP2: 0 computes and 1 copies batches."""
PER_MACHINE = 8
"""Cards of one machine at most."""
SHARDING = "torch.distributed.fsdp._fully_shard"


class Streams:
    """The streams of a device that does not exist."""

    def __init__(self, recorder: Recorder, work: OrderedWork) -> None:
        self.recorder, self.work = recorder, work
        self.made = self.events = 0
        self.current = Stream(self, 0)

    def make(self, priority: int = 0) -> Stream:
        """Return a new stream."""
        self.made += 1
        return Stream(self, FIRST + self.made - 1)

    def use(self, tensor: Tensor, stream: Stream) -> None:
        """Note that a stream uses a tensor (`record_stream`)."""
        self.recorder.use_on(tensor, stream.number)

    def synchronize(self, device: Any = None) -> None:
        """Let the host wait for all streams."""
        self.recorder.host_waited(self.recorder.later.ended)

    @contextlib.contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        """Start all work of the block on a stream."""
        before, self.current = self.current, stream
        self.recorder.stream = self.work.stream = stream.number
        try:
            yield
        finally:
            self.current = before
            self.recorder.stream = self.work.stream = before.number


class Stream:
    """A stream of the fake device."""

    def __init__(self, streams: Streams, number: int) -> None:
        self.streams, self.number = streams, number
        # FSDP2 of torch 2.15 notes which stream reads a gradient; the note changes no memory on a GPU.
        self.stream_id, self.device_index, self.device_type = number, 0, 0

    def record_event(self, event: Event | None = None) -> Event:
        """Put an event on this stream."""
        event = event or Event(self.streams)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream wait for an event."""
        self.streams.work.wait_for_event(event.number, self.number)

    def wait_stream(self, other: Stream) -> None:
        """Wait for all that another stream was given."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Let the host wait for all that it was given."""
        self.record_event().synchronize()


class Event:
    """An event of the fake device."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        streams.events += 1
        self.number = streams.events
        self.freed = 0

    def record(self, stream: Stream | None = None) -> Event:
        """Put it on a stream."""
        stream = stream or self.streams.current
        self.streams.work.record(self.number, stream.number)
        self.freed = self.streams.recorder.later.ended
        return self

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for it."""
        (stream or self.streams.current).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for it: what was freed before it was recorded can be used again."""
        self.streams.recorder.host_waited(self.freed)


def on_one_machine(ranks: int) -> int:
    """Return the number of cards of one machine: all of them, or as many as divide them."""
    return ranks if ranks <= PER_MACHINE else math.gcd(ranks, PER_MACHINE)


class Chunks:
    """The chunks of a tensor (`torch.chunk`), each made when it is asked for: FSDP2 makes all and takes two.

    Of thousands of ranks the rest would be most of a trace's time (`fully_shard`'s `_chunk_with_empty`).
    """

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self.tensor, self.dim, self.each = tensor, dim, -(-tensor.size(dim) // count)

    def __getitem__(self, number: int) -> Tensor:
        start = number * self.each
        length = min(self.each, self.tensor.size(self.dim) - start)
        return (
            self.tensor.narrow(self.dim, start, length) if length > 0 else self.tensor.new_empty(0)
        )


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Be one of `size` ranks whose collectives do nothing, within the block."""
    store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    register()
    capable: list[str] = dist.Backend.backend_capability["fake"]
    if DEVICE not in capable:
        capable.append(DEVICE)
    dist.init_process_group(f"cpu:fake,{DEVICE}:fake", rank=rank, world_size=size, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def paused(recorder: Recorder) -> Iterator[None]:
    """Let a recorder pass over what is called within the block."""
    before, recorder.is_paused = recorder.is_paused, True
    try:
        yield
    finally:
        recorder.is_paused = before


@contextlib.contextmanager
def of_true_numbers(recorder: Recorder) -> Iterator[None]:
    """Make no fake tensors within the block: not by the mode, and not from the results that a recorder knows."""
    with paused(recorder), unset_fake_temporarily():
        yield


@contextlib.contextmanager
def watch_shards(recorder: Recorder, work: OrderedWork, as_gloo: bool = False) -> Iterator[None]:
    """Show sharded tensors as such to a recorder, and give the fake device streams, within the block.

    `as_gloo`: reduce-scatter takes a copy of its input, as gloo does, which has none of its own
    (`ProcessGroupGloo::_reduce_scatter_base`).
    """
    parameters = importlib.import_module(f"{SHARDING}._fsdp_param")
    collectives = importlib.import_module(f"{SHARDING}._fsdp_collectives")
    shard = importlib.import_module("mpt.parallel.shard")
    streams = Streams(recorder, work)

    def marking(original: Callable[..., Tensor], category: str) -> Callable[..., Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            made = original(*args, **kwargs)
            recorder.mark([made], category)
            return made

        return allocate

    def init_outputs(own: Any, *args: Any, **kwargs: Any) -> None:
        outputs(own, *args, **kwargs)  # torch 2.11 names `force_recreate`
        recorder.mark(own.all_gather_outputs, "gathered parameters")

    def scatter_copy(
        own: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        copy = input_tensor.clone()
        result = scattering(own, output_tensor, copy, *args, **kwargs)
        del copy
        return result

    def propagate(*args: Any) -> Any:  # on fake tensors of the whole shape
        with paused(recorder):
            return propagating(*args)

    def make_mesh(*args: Any, **kwargs: Any) -> Any:
        with of_true_numbers(recorder):
            return init_device_mesh(*args, **kwargs)

    outputs = parameters.FSDPParam.init_all_gather_outputs
    gather, scatter = collectives.DefaultAllGather, collectives.DefaultReduceScatter
    propagator = importlib.import_module(
        "torch.distributed.tensor._sharding_prop"
    ).ShardingPropagator
    propagating = propagator._propagate_tensor_meta_non_cached
    scattering = scatter.__call__
    flat = importlib.import_module("torch.distributed.fsdp._flat_param")
    runtime = importlib.import_module("torch.distributed.fsdp._runtime_utils")
    handle = importlib.import_module("torch.distributed.fsdp._common_utils")._FSDPDeviceHandle
    changes: list[tuple[Any, str, Any]] = [
        (propagator, "_propagate_tensor_meta_non_cached", propagate),
        (handle, "is_available", lambda own: True),
        (shard, "init_device_mesh", make_mesh),
        (parameters, "_chunk_with_empty", Chunks),
        (parameters.FSDPParam, "init_all_gather_outputs", init_outputs),
        (gather, "allocate", marking(gather.allocate, "gathered parameters")),
        (scatter, "allocate", marking(scatter.allocate, "reduce buffers")),
    ]
    if as_gloo:
        changes.append((scatter, "__call__", scatter_copy))
    fake: Any = vars(torch).get(DEVICE)
    if fake is not None:
        changes += [
            (fake, "device_count", lambda: on_one_machine(work.ranks)),
            (fake, "Stream", streams.make),
            (fake, "Event", lambda *args, **kwargs: Event(streams)),
            (fake, "current_stream", lambda device=None: streams.current),
            (fake, "stream", streams.entered),
            *((one, "_no_dispatch_record_stream", streams.use) for one in (flat, runtime)),
            *((one, "synchronize", streams.synchronize) for one in (fake, torch.cuda)),
        ]
    missing = object()
    before = [(owner, name, vars(owner).get(name, missing)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
