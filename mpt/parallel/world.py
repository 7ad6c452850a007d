"""The processes that train together, as everything else sees them. This one is a process alone, which does nothing.

A decision of one process alone (an overflow, memory that ran out, a signal, a rollback) would make the others wait
for it for ever, so every such decision passes through `World.agree`, and `tell` if the first process decides.
Several processes are `mpt.parallel.ranks.Ranks`; a "rank" is one of them, by number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor, nn

from mpt.parallel.exchange import Exchange
from mpt.parallel.mail import Mail

T = TypeVar("T")
FaultKind = Literal["none", "out_of_memory", "unsuited", "error"]
FAULT_KINDS: tuple[FaultKind, ...] = ("none", "out_of_memory", "unsuited", "error")
"""By how much they hinder an update: if ranks differ, the last one counts."""


class Stop(Protocol):
    """A request to stop, as `mpt.run.process.signals.StopRequest` notes it."""

    signal_number: int | None


@dataclass(frozen=True)
class Outcome:
    """How an update went up to its optimizer's step: on one rank, or on the worst of all."""

    fault: FaultKind = "none"
    text: str = ""
    finite: bool = True
    is_random: bool = False
    """Whether the forward used random numbers."""


class PeerFaultError(RuntimeError):
    """Another rank could not finish an update; `kind` says how it is to be taken, as if it had happened here."""

    def __init__(self, kind: FaultKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class World:
    """A process that trains alone."""

    rank = 0
    size = 1
    on_machine = 1
    """How many ranks run on this one's machine."""
    host = ""
    is_sharded = False
    """Whether each rank holds a part of the weights, so that forwards and saving need all of them."""
    units: Sequence[Any] = ()
    """The parts of sharded networks that are gathered together."""
    numbers: Collection[str] = ()
    """Names of weights that are single numbers in a checkpoint, and have one row while they are sharded."""
    shared_failure: BaseException | None = None
    """The failure with which this rank met others that failed too, or learnt of another's: all are at one point."""
    can_fail_alone = True
    """Whether a rank that fails in an update can still meet the others: none waits for it inside a layer."""

    @property
    def is_first(self) -> bool:
        """Is this the rank that writes and speaks?"""
        return self.rank == 0

    def choose_device(self, wanted: str) -> str:
        """Return the device of this rank."""
        return wanted

    def place(self, count: int) -> tuple[int, int]:
        """Return the range of this rank's samples in a batch."""
        return 0, count

    def whole(self, part: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Return the whole batch of `count` samples of which every rank has its part."""
        return dict(part)

    def exchange(self, phase: str, parameters: Sequence[nn.Parameter]) -> Exchange:
        """Return the reducer of a phase's gradients over the ranks."""
        raise AssertionError("a process alone exchanges nothing")

    def agree(self, site: str, own: Outcome, exchange: Exchange) -> tuple[Outcome, list[bool]]:
        """Return how an update went on all ranks together, and which weights have a gradient on any."""
        raise AssertionError("a process alone has nobody to agree with")

    def agreed_stop(self, stop: Stop) -> int | None:
        """Return the number of the signal that all ranks stop for at the end of this step."""
        return stop.signal_number

    def tell(self, value: T) -> T:
        """Return the first rank's value."""
        return value

    def ask(self, work: Callable[[], T]) -> T:
        """Let the first rank do something and return its result."""
        return work()

    def share_failure(self, own: BaseException | None) -> None:
        """Raise a failure of work that each rank does alone on all of them, unless all know it already."""
        if own is not None:
            raise own

    def collect(self, value: T) -> list[T]:
        """Return every rank's value."""
        return [value]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on the first rank, and nothing on the others."""
        return [value]

    def add(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums of tensors over the ranks."""
        return dict(values)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Put the mean over the ranks into tensors."""

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Put the first rank's values into tensors."""

    def note_step(self, step: int) -> None:
        """Remember the step for the message if this rank is lost."""

    def watch_over(self, on_lost: Callable[[str], None]) -> None:
        """Call a function with a text if this is the process that is to record that another one was lost."""

    def ending(self, error: BaseException) -> None:
        """Report that this rank ends with a failure alone."""

    def settle(self) -> None:
        """Leave nothing gathered of sharded networks."""

    def mail(self) -> Mail:
        """Return a store for messages between the ranks' threads."""
        raise AssertionError("a process alone has nobody to write to")

    def take_waited_seconds(self) -> float:
        """Return the seconds spent waiting for others since the last call."""
        return 0.0


ALONE = World()


def share(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return the range of a rank's part of `count`. The first ones have one more if it does not divide."""
    least, rest = divmod(count, size)
    start = rank * least + min(rank, rest)
    return start, start + least + (rank < rest)
