"""Several things at a time in threads of this process, all ended when one fails or a signal comes.

The main thread only waits, so that it hears signals at once; workers wait for processes. `Stop` is how a thread
learns that its process is to be ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from mpt.errors import Interrupted
from mpt.run.process.host_memory import available_bytes
from mpt.run.process.signals import StopRequest

LOOK_SECONDS = 0.2
FOR_EVER_SECONDS = 1e6
MOST_OF_MEMORY = 0.9
"""The share of the available memory that runs may take together."""

T = TypeVar("T")


class Stop:
    """Whether the work is to end: a signal came, or something failed."""

    def __init__(self, request: StopRequest | None = None) -> None:
        self.request = request or StopRequest()
        self.failed = False
        # the awaited process has a patience of its own
        self.request.patience_seconds = FOR_EVER_SECONDS

    @property
    def requested(self) -> bool:
        """Is there a reason to end?"""
        return self.failed or self.request.requested

    @property
    def signal_number(self) -> int | None:
        """The signal that came, if one did."""
        return self.request.signal_number


class HostMemory:
    """The number of processes that fit into the host's memory, once the largest has been measured."""

    def __init__(self, *, is_needed: bool = True) -> None:
        self.is_needed = is_needed
        """Whether a second process waits until a first one's memory is known."""
        self.most_bytes = 0

    def see(self, used_bytes: int) -> None:
        """Record the memory of a process."""
        self.most_bytes = max(self.most_bytes, used_bytes)

    def allows(self) -> int | None:
        """Return how many processes fit into the free memory; None if it is not known. Ask while none runs."""
        if not self.most_bytes:
            return 1 if self.is_needed else None
        free = available_bytes()
        return None if free is None else max(1, int(MOST_OF_MEMORY * free / self.most_bytes))


def take_turns(
    works: Sequence[Callable[[int, Stop], T]],
    count: int,
    ended: Callable[[int, T], None],
    limit: Callable[[], int | None] = lambda: None,
) -> None:
    """Do the works in their order, `count` at a time, and give each one's index and result to `ended` in this thread.

    Each is called with the slot it has, 0 to `count` - 1. `limit` is asked for fewer whenever nothing continues. The
    first failure ends the others, is waited for and raised; a signal raises Interrupted.
    """
    waiting, free = deque(enumerate(works)), list(range(count))
    running: dict[Future[T], tuple[int, int]] = {}
    failure: BaseException | None = None
    stop = Stop()
    with stop.request, ThreadPoolExecutor(count) as pool:
        try:
            while (waiting and not stop.requested) or running:
                if not running:
                    at_most = min(count, limit() or count)
                while waiting and len(running) < at_most and not stop.requested:
                    index, work = waiting.popleft()
                    slot = free.pop(0)
                    running[pool.submit(work, slot, stop)] = index, slot
                done, _ = wait(running, LOOK_SECONDS, FIRST_COMPLETED)
                for future in done:
                    index, slot = running.pop(future)
                    free.append(slot)
                    if (error := future.exception()) is None:
                        ended(index, future.result())
                    else:
                        failure, stop.failed = failure or error, True
        finally:
            stop.failed = True  # work still in progress ends with this block
    if failure is not None:
        raise failure
    if stop.signal_number is not None:
        raise Interrupted("interrupted; the same command goes on from here", stop.signal_number)


def peak_bytes(process: int) -> int:
    """Return the most host memory that a process has had so far, as Linux tells it; 0 elsewhere."""
    try:
        with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as lines:
            return next(
                (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0
            )
    except OSError:
        return 0
