"""A step's time where ranks exchange tensors: operators and collectives in the order in which the host starts them.

The card computes on one stream; collectives run one after the other on another, which is how one communicator has
them. A collective begins when its tensor is there and the one before it is done. Computing waits where the step waits
for it. What of the communication computing did not cover is the exposed part. The order is the traced one, so a change
in how gradients are sent changes the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mpt.planner.gpus import Gpu
from mpt.planner.links import Cluster, Kind
from mpt.planner.time_model import Work


@dataclass(frozen=True)
class Sent:
    """A collective over `size` ranks that are `stride` apart; `count` is the whole tensor's bytes."""

    kind: Kind
    count: int
    size: int
    stride: int = 1
    after: int | None = None
    """Position of the event that it waits for; None: for everything before it."""


@dataclass(frozen=True)
class Awaited:
    """Computing goes on when this collective, by number, is done."""

    number: int


@dataclass
class OrderedWork(Work):
    """Operators with their order, and the collectives between them."""

    events: list[tuple[int, int, bool] | Sent | Awaited] = field(default_factory=list)
    sent: int = 0
    is_noted: bool = True
    """Whether collectives are noted: the last traced step's are."""

    def add(self, flops: int, moved: int, half: bool) -> None:
        """Count an operator of the device, and keep its place."""
        super().add(flops, moved, half)
        self.events.append((flops, moved, half))

    def send(self, what: Sent) -> int:
        """Note that a collective starts; return its number."""
        self.events.append(what)
        self.sent += 1
        return self.sent - 1

    def wait(self, number: int) -> None:
        """Note that computing needs a collective's result."""
        self.events.append(Awaited(number))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one rank."""

    total: float
    computing: float
    communication: float
    exposed: float
    sent_bytes: int

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        overlapped = self.communication - min(self.exposed, self.communication)
        return {
            "total": self.total,
            "computing": self.computing,
            "communication": self.communication,
            "overlapped": overlapped,
            "exposed": self.exposed,
            "sent_bytes": self.sent_bytes,
        }


def step_time(work: OrderedWork, gpu: Gpu, cluster: Cluster, factor: float = 1.0) -> StepTime:
    """Return the time of the traced step. `factor` is the calibration's, for computing."""
    computed = network_free = communication = 0.0
    sent_bytes = 0
    ready: list[float] = []  # when each collective is done
    moments: list[float] = []  # when each event's turn on the computing stream was over
    for event in work.events:
        if isinstance(event, Sent):
            seconds = cluster.seconds(event.kind, event.count, event.size, event.stride)
            begins = computed if event.after is None else moments[event.after]
            network_free = max(network_free, begins) + seconds
            communication += seconds
            sent_bytes += event.count
            ready.append(network_free)
        elif isinstance(event, Awaited):
            computed = max(computed, ready[event.number])
        else:
            computed += work.operator_seconds(gpu, *event) * factor
        moments.append(computed)
    alone = work.seconds(gpu) * factor
    on_device = sum(work.operator_seconds(gpu, *key) * count for key, count in work.operators.items()) * factor
    # What the host's link and processor add is the same with and without other ranks.
    total = max(computed, network_free) + alone - on_device
    return StepTime(total, alone, communication, max(0.0, total - alone), sent_bytes)
