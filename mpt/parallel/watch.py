"""The watch over all ranks: a thread during each training that finds who was lost, so that nobody waits for it.

Each rank writes into the common store twice a second that it lives, and its step. Rank 0 looks at all of them, the
others at rank 0. A rank that fails alone (a file it cannot read, a mistake of the program) writes a fault; one that
says nothing any more, or does not move while others wait for it, is named by whoever finds it. A rank that reads a
fault has a moment to end alone: then its process is ended here, since a collective that waits cannot be interrupted. If
no agent of torchrun keeps the store, it goes with rank 0: anything read before that still counts. A store whose process
is stopped neither answers nor fails, and a call to it waits for ever: a second thread counts the time and ends this
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mpt.errors import RankError
from mpt.parallel.meeting import connect
from mpt.parallel.place import Place

BEAT_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""Time to end by oneself after another rank's fault."""
SILENT_SECONDS = 60.0
"""A rank that has not told of itself for so long is lost."""
MOST_TICK_SECONDS = 2.0
"""A longer pause between two beats is one in which this process was stopped itself (Ctrl-Z)."""
END_SECONDS = 300.0
"""How long a rank waits at its end for the first one, which may be writing a report."""
FAULT, RECORDER = "fault", "recorder"
WAY_ON = "Go on from the last checkpoint with --resume"


@dataclass(frozen=True)
class Fault:
    """The reason for which all ranks end."""

    lost: int | None
    """The rank it happened to, if that is known."""
    text: str
    code: int
    """The exit code that all end with."""


class Watch:
    """The thread. `on_lost` is called with a text on the one rank that is to record that another was lost."""

    def __init__(self, place: Place, timeout: float) -> None:
        self.place, self.timeout = place, timeout
        self.on_lost: Callable[[str], None] = lambda text: None
        self.store = connect(place, False)  # a connection serves one thread at a time
        self.beat = 0
        self.known: dict[int, dict[str, Any]] = {}
        """The ranks' last reports."""
        self.fault: Fault | None = None
        self.has_store = True
        self.is_recorded = False
        self.ending = threading.Lock()
        self.awake = 0.0
        """Seconds for which this process has run, those in which it was stopped left out."""
        self.answered = 0.0
        """When the store last answered, on the clock of `awake`."""
        self.seen: dict[int, tuple[str, float]] = {}
        self.moved: dict[int, tuple[Any, float]] = {}
        self.faulty_since: float | None = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="mpt-watch", daemon=True)
        self.guard = threading.Thread(target=self._guard_store, name="mpt-watch-store", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self.guard.start()
        self._tell()
        self.thread.start()

    def close(self) -> None:
        """Stop watching."""
        self.ended.set()
        self.thread.join(5)
        self.guard.join(5)

    def _tell(self) -> None:
        place = self.place
        self.beat += 1
        told = {
            "host": place.host,
            "process": os.getpid(),
            "step": place.step,
            "moves": place.moves,
            "waiting": place.is_waiting,
            "beat": self.beat,
        }
        self.store.set(f"rank/{place.rank}", json.dumps(told))

    def _run(self) -> None:
        while not self.ended.wait(BEAT_SECONDS):
            try:
                self._tell()
                self._look()
                self.answered = self.awake
            except RuntimeError:
                if self.ended.is_set() or self.place.is_ending:
                    return
                self._end(self.explain_lost_store())

    def _guard_store(self) -> None:
        """Count the seconds, and end this process if neither the store answers nor the training moves."""
        limit = min(SILENT_SECONDS, self.timeout)
        moves, moved, before = self.place.moves, 0.0, time.monotonic()
        while not self.ended.wait(BEAT_SECONDS):
            now = time.monotonic()
            self.awake += min(now - before, MOST_TICK_SECONDS)
            before = now
            if self.place.moves != moves:
                moves, moved = self.place.moves, self.awake
            silent = self.awake - self.answered
            if silent > limit and self.awake - moved > limit:
                self._end(self.explain_lost_store(f"has not answered for {silent:.0f} s"))

    def _look(self) -> None:
        """Act on a fault, or find one."""
        fault = self.read_fault()
        now = self.awake
        if fault is not None:
            self.faulty_since = now if self.faulty_since is None else self.faulty_since
            if not self.place.is_ending and now - self.faulty_since > GRACE_SECONDS:
                self._end(fault)
            return
        for rank in range(self.place.size) if self.place.rank == 0 else (0,):
            if rank == self.place.rank or not self.store.check([f"rank/{rank}"]):
                continue
            text = self.store.get(f"rank/{rank}").decode()
            if self.seen.get(rank, ("", 0.0))[0] != text:
                self.seen[rank] = text, now
            told = self.known[rank] = json.loads(text)
            moved = (told["step"], told["moves"], told["waiting"])
            if self.moved.get(rank, (None, 0.0))[0] != moved:
                self.moved[rank] = moved, now
            silent, still = now - self.seen[rank][1], now - self.moved[rank][1]
            if silent > min(SILENT_SECONDS, self.timeout) and not self.store.check(
                [f"ended/{rank}"]
            ):
                self.find_fault(rank, f"{self.describe(rank)} has not answered for {silent:.0f} s")
            elif self.place.is_waiting and not told["waiting"] and still > self.timeout:
                text = (
                    f"{self.describe(rank)} has not moved for {still:.0f} s, and others wait for it"
                )
                self.find_fault(rank, text)

    def describe(self, rank: int) -> str:
        """Return a rank by number, host, process and the last step that it told of."""
        told = self.remember(rank)
        if told is None:
            return f"rank {rank} (step {self.place.step})"
        # ranks are never a step apart; a report may be old
        step = max(told["step"], self.place.step)
        return f"rank {rank} (host {told['host']}, process {told['process']}, step {step})"

    def remember(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's last report known here, even if the store is gone."""
        with contextlib.suppress(RuntimeError):  # the store may be going
            if self.has_store and self.store.check([f"rank/{rank}"]):
                self.known[rank] = json.loads(self.store.get(f"rank/{rank}").decode())
        return self.known.get(rank)

    def read_fault(self) -> Fault | None:
        """Return the first fault that any rank has written."""
        if self.fault is None and self.store.check([FAULT]):
            self.fault = Fault(**json.loads(self.store.get(FAULT).decode()))
        return self.fault

    def find_fault(self, rank: int, text: str) -> None:
        """Write a fault that was found in another rank, and say so, once."""
        if self.write_fault(rank, text, RankError.exit_code):
            print(f"error: {text}. {WAY_ON}", file=sys.stderr, flush=True)

    def write_fault(self, lost: int | None, text: str, code: int) -> bool:
        """Write a fault that all ranks end for; return whether it is the first."""
        own = json.dumps(asdict(Fault(lost, text, code)))
        first = self.store.compare_set(FAULT, "", own).decode()
        self.fault = Fault(**json.loads(first))
        return bool(first == own)

    def explain_lost_store(self, end: str = "was lost") -> Fault:
        """Return the fault that this rank ends for now that the store is gone, and print it if nobody has.

        Whoever kept it is lost: torchrun's agent, or rank 0; `end` says how.
        """
        with self.ending:
            self.has_store = False  # asking a stopped process again would take as long again
            if self.fault is None:
                if self.place.has_agent:
                    started = (
                        "the process that started the training and keeps the store of the ranks"
                    )
                    lost, text = None, f"{self.describe(self.place.rank)}: {started} {end}"
                else:
                    lost, text = (
                        0,
                        f"{self.describe(0)} {end}, and with it the store that the processes meet at",
                    )
                print(f"error: {text}. {WAY_ON}", file=sys.stderr, flush=True)
                self.fault = Fault(lost, text, RankError.exit_code)
            return self.fault

    def record(self, fault: Fault) -> None:
        """Have a loss noted in the run's events, by one of those that are left."""
        with self.ending:  # the other thread ends this process as soon as it can
            if not self.is_recorded and self._is_recorder(fault):
                self.on_lost(fault.text)
            self.is_recorded = True

    def _is_recorder(self, fault: Fault) -> bool:
        """Return whether this is the rank that records a loss: the first one, or the quickest if that one is lost.

        Without a store to settle that, it is the second rank, and the first one of the next machine.
        """
        rank, place = self.place.rank, self.place
        if rank == 0 or fault.lost not in (0, None):
            return rank == 0 and fault.lost != 0
        if self.has_store:
            with contextlib.suppress(RuntimeError):
                return fault.lost == 0 and self.store.compare_set(
                    RECORDER, "", str(rank)
                ).decode() == str(rank)
        return rank == place.on_machine or (rank == 1 and not place.has_agent)

    def find_lost(self) -> list[int]:
        """Return the ranks that say nothing for two seconds, other than those that have ended in order."""
        keys = [
            (rank, f"rank/{rank}") for rank in range(self.place.size) if rank != self.place.rank
        ]
        before = {rank: self.store.get(key) for rank, key in keys if self.store.check([key])}
        time.sleep(4 * BEAT_SECONDS)
        return [
            rank
            for rank, key in keys
            if rank in before
            and self.store.get(key) == before[rank]
            and not self.store.check([f"ended/{rank}"])
        ]

    def _end(self, fault: Fault) -> None:
        """End this process, from this thread."""
        self.record(fault)
        os._exit(fault.code)
