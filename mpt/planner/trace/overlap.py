"""A step's time if ranks exchange tensors: operators and collectives in the order in which the host starts them.

As on a GPU there are streams. What is started on one runs in order; streams wait for each other's events and for
nothing else, and the host is never waited for. A collective begins when its stream has come to it and the one before it
is done, which is how one communicator has them. What of the communication computing did not cover is the exposed part.
The order is the traced one, so a change in how gradients are sent, or weights gathered, changes the plan.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from mpt.planner.answers.plan import StepSeconds
from mpt.planner.device.outcomes import Outcome, Unit
from mpt.planner.facts.gpus import Gpu
from mpt.planner.facts.links import Cluster, Kind
from mpt.planner.trace.time_model import Work
from mpt.run.process.storage_trace import tensors_in

COLLECTIVES: dict[str, Kind] = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
}
NO_WORK = ("c10d::", "_c10d_functional::")
COMPUTING = 0
"""The stream that the step itself runs on."""


@dataclass(frozen=True)
class Operator:
    """An operator of the device."""

    flops: int
    moved: int
    unit: Unit
    stream: int
    share: float = 1.0
    """Of the steps, those in which it happens."""


@dataclass(frozen=True)
class Sent:
    """A collective over `size` ranks that are `stride` apart; `count` is the whole tensor's bytes."""

    kind: Kind
    count: int
    size: int
    stride: int = 1
    stream: int = COMPUTING
    is_waited_for: bool = False
    """Whether its own stream waits until it is done."""
    share: float = 1.0
    """Of the steps, those in which it is sent."""


@dataclass(frozen=True)
class Awaited:
    """Computing continues when this collective, by number, is done."""

    number: int


@dataclass(frozen=True)
class Recorded:
    """A stream has come to an event."""

    event: int
    stream: int


@dataclass(frozen=True)
class Waits:
    """A stream waits for an event."""

    event: int
    stream: int


Event = Operator | Sent | Awaited | Recorded | Waits
"""Work that the host starts, or lets a stream wait for."""


@dataclass
class OrderedWork(Work):
    """Operators with their order, and the collectives between them."""

    events: list[Event] = field(default_factory=list)
    sent: int = 0
    stream: int = COMPUTING
    """The stream that operators are started on now."""
    is_noted: bool = True
    """Whether collectives are noted: the last traced step's are."""
    ranks: int = 1
    """How many ranks an all-reduce that a layer or torch starts is over."""
    stride: int = 1
    """How far apart those are."""

    def observe(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        outcome: Outcome | None = None,
    ) -> None:
        """Add one operator, or a collective that torch's own code starts."""
        name = func._schema.name
        if not name.startswith(NO_WORK):
            super().observe(func, args, kwargs, result, outcome)
        elif name in COLLECTIVES:
            self._send_torch(COLLECTIVES[name], [*tensors_in((args, kwargs)), *tensors_in(result)])

    def _send_torch(self, kind: Kind, tensors: list[Tensor]) -> None:
        sizes = [tensor.nbytes for tensor in tensors]
        whole, part = max(sizes), min(sizes)
        size = max(1, whole // part) if kind != "all_reduce" else self.ranks
        stride = self.stride if kind == "all_reduce" else 1
        self.send(Sent(kind, whole, size, stride, self.stream, is_waited_for=True))

    def add(self, flops: int, moved: int, unit: Unit) -> None:
        """Count an operator of the device, and keep its place."""
        super().add(flops, moved, unit)
        self.events.append(Operator(flops, moved, unit, self.stream, self.share))

    def send(self, what: Sent) -> int:
        """Note that a collective starts; return its number."""
        self.events.append(replace(what, share=self.share))
        self.sent += 1
        return self.sent - 1

    def wait(self, number: int) -> None:
        """Note that computing needs a collective's result."""
        self.events.append(Awaited(number))

    def record(self, event: int, stream: int) -> None:
        """Note that an event was put on a stream."""
        if self.is_noted:
            self.events.append(Recorded(event, stream))

    def wait_for_event(self, event: int, stream: int) -> None:
        """Note that a stream waits for an event."""
        if self.is_noted:
            self.events.append(Waits(event, stream))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one rank."""

    total: float
    computing: float
    communication: float
    exposed: float
    sent_bytes: int

    def parts(self) -> StepSeconds:
        """Return it as a plan has it."""
        return StepSeconds(
            total=self.total,
            computing=self.computing,
            communication=self.communication,
            overlapped=max(0.0, self.communication - self.exposed),
            exposed=self.exposed,
            sent_bytes=self.sent_bytes,
        )


def step_time(work: OrderedWork, gpu: Gpu, cluster: Cluster, factor: float = 1.0) -> StepTime:
    """Return the time of the traced step. `factor` is the calibration's, for computing."""
    clocks: defaultdict[int, float] = defaultdict(float)
    moments: dict[int, float] = {}
    network_free = communication = 0.0
    sent_bytes = 0
    ready: list[float] = []  # when each collective is done
    on_device = 0.0
    for event in work.events:
        if isinstance(event, Operator):
            seconds = (
                work.operator_seconds(gpu, event.flops, event.moved, event.unit)
                * factor
                * event.share
            )
            clocks[event.stream] += seconds
            on_device += seconds if event.stream == COMPUTING else 0.0
        elif isinstance(event, Sent):
            seconds = (
                cluster.seconds(event.kind, event.count, event.size, event.stride) * event.share
            )
            network_free = max(network_free, clocks[event.stream]) + seconds
            communication += seconds
            sent_bytes += round(event.count * event.share)
            ready.append(network_free)
            if event.is_waited_for:
                clocks[event.stream] = network_free
        elif isinstance(event, Awaited):
            clocks[COMPUTING] = max(clocks[COMPUTING], ready[event.number])
        elif isinstance(event, Recorded):
            moments[event.event] = clocks[event.stream]
        else:
            clocks[event.stream] = max(clocks[event.stream], moments.get(event.event, 0.0))
    everything = (
        sum(work.operator_seconds(gpu, *key) * count for key, count in work.operators.items())
        * factor
    )
    # The host's link and processor add the same with and without other ranks.
    computing = on_device + work.seconds(gpu) * factor - everything
    total = max(*clocks.values(), network_free) - on_device + computing if clocks else network_free
    return StepTime(total, computing, communication, max(0.0, total - computing), sent_bytes)
