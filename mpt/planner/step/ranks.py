"""One rank of a world that is not there: the real exchange of `mpt.parallel`, with collectives that only note bytes.

The rank's part of the batch, the whole batch that it gathers, its buckets and the order in which they leave are those
of `mpt.parallel.ranks` and `mpt.parallel.exchange` themselves, run on fake tensors. Only calls that would talk to other
processes are replaced.

Not seen by tensors: NCCL's buffers (`mpt.planner.facts.links`), and the memory that NCCL's backend adds to a gather
into a list of tensors, a flat copy of the result (`ProcessGroupNCCL::allgather`, `newLikeFlat`), which is allocated
here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from mpt.config.schema import Parallel
from mpt.parallel.exchange import Exchange
from mpt.parallel.place import Place
from mpt.parallel.ranks import Ranks
from mpt.parallel.world import Outcome, Stop
from mpt.planner.trace.overlap import OrderedWork, Sent

T = TypeVar("T")


class Noted:
    """A collective that was noted."""

    def __init__(self, work: OrderedWork, number: int | None) -> None:
        self.work, self.number = work, number

    def wait(self) -> None:
        """Note that its result is needed."""
        if self.number is not None:
            self.work.wait(self.number)


class PlannedRank(Ranks):
    """A rank of `size`, alone in its process. All others are assumed to do the same."""

    def __init__(
        self,
        rank: int,
        size: int,
        settings: Parallel,
        work: OrderedWork,
        is_nccl: bool,
        per_machine: int = 8,
    ) -> None:
        self.rank, self.size, self.settings = rank, size, settings
        self.host, self.work, self.is_nccl = "", work, is_nccl
        self.on_machine = min(size, per_machine)
        self.location = Place(rank, size, rank, "", 0, host="")
        self.waited = 0.0
        self.signal: int | None = None
        self.stop: Stop | None = None
        self.exchanges: dict[str, Exchange] = {}
        self.on_gpu = False
        self.is_sharded = settings.strategy == "fsdp"
        self.can_fail_alone = True  # a failure is this plan's, and has nobody waiting
        self.mark: Callable[[Sequence[Tensor], str], None] = lambda tensors, category: None
        """Reports the purpose of tensors to the recorder."""

    def note(self, sent: Sent) -> Noted:
        """Note a collective of the last traced step."""
        return Noted(self.work, self.work.send(sent) if self.work.is_noted else None)

    def exchange(self, phase: str, parameters: Sequence[torch.nn.Parameter]) -> Exchange:
        """Return the reducer of a phase's gradients, made at its first update."""
        is_new = phase not in self.exchanges
        found = super().exchange(phase, parameters)
        if is_new:
            self.mark([bucket.buffer for bucket in found.buckets], "reduce buffers")
        return found

    def _send(self, buffer: Tensor) -> Noted:
        return self.note(Sent("all_reduce", buffer.nbytes, self.size))

    def _gather_bytes(self, received: Tensor, sent: Tensor) -> None:
        self.mark([received, sent], "whole batch")
        if self.is_nccl:
            flat = torch.empty_like(received)
            self.mark([flat], "whole batch")
        self.note(Sent("all_gather", received.nbytes, self.size)).wait()

    def agree(self, site: str, own: Outcome, exchange: Exchange) -> tuple[Outcome, list[bool]]:
        """Take this rank's outcome for that of all."""
        if own.fault == "none":
            exchange.wait()
        return own, exchange.with_gradients()

    def collect(self, value: T) -> list[T]:
        """Return this rank's value for every rank."""
        return [value] * self.size

    def _tell(self, value: T, source: int) -> T:
        return value

    def note_step(self, step: int) -> None:
        """Do nothing: nobody watches."""

    def ending(self, error: BaseException) -> None:
        """Do nothing: nobody watches."""
