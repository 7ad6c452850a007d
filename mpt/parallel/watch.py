"""The watch over all ranks: a thread beside each training that finds who was lost, so that nobody waits for it.

Each rank tells the common store twice a second that it lives, and where it is. Rank 0 looks at all of them, the others
at rank 0. A rank that fails by itself (a file it cannot read, a mistake of the program) writes a fault; one that says
nothing any more, or does not move while others wait for it, is named by whoever finds it. A rank that reads a fault has
a moment to end by itself: then its process is ended here, since a collective that waits cannot be interrupted.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from mpt.errors import RankError
from mpt.parallel.place import Place

BEAT_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""Time to end by oneself after another rank's fault."""
SILENT_SECONDS = 60.0
"""A rank that has not told of itself for so long is lost."""
END_SECONDS = 300.0
"""How long a rank waits at its end for the first one, which may be writing a report."""
CONNECT_SECONDS = 60.0
FAULT = "fault"


def connect(place: Place, is_master: bool) -> Any:
    """Return a connection to the store that ranks meet at. Raises RankError where there is none."""
    where = f"MASTER_ADDR={place.address} MASTER_PORT={place.port}"
    if not is_master:
        await_answer(place, where)
    try:
        store = TCPStore(
            place.address,
            place.port,
            is_master=is_master,
            timeout=timedelta(seconds=CONNECT_SECONDS),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:  # torch's DistNetworkError is one
        text = str(error).split("\n")[0]
        if is_master and ("EADDRINUSE" in text or "already in use" in text):
            raise RankError(f"{where}: the port is in use on this machine; set MASTER_PORT to a free one") from None
        raise unreachable(place, where, text) from None
    return PrefixStore(f"mpt/{place.restarts}", store)


def await_answer(place: Place, where: str) -> None:
    """Wait until somebody listens there; torch's own waiting fills the screen. Raises RankError where nobody does."""
    until = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise unreachable(place, where, str(error)) from None
        time.sleep(0.2)


def unreachable(place: Place, where: str, text: str) -> RankError:
    """Return what is said where the other processes cannot be reached."""
    return RankError(
        f"{where}: rank {place.rank} on {place.host} cannot reach the other processes there within "
        f"{CONNECT_SECONDS:.0f} s ({text[:160]}). Is the address that of the first machine, and the port open?"
    )


class Watch:
    """The thread. `on_lost` is called before this process is ended because of another one."""

    def __init__(self, place: Place, timeout: float) -> None:
        self.place, self.timeout = place, timeout
        self.on_lost: Callable[[str], None] = lambda text: None
        self.store = connect(place, False)  # a connection serves one thread at a time
        self.beat = 0
        self.seen: dict[int, tuple[str, float]] = {}
        self.moved: dict[int, tuple[Any, float]] = {}
        self.faulty_since: float | None = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="mpt-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._tell()
        self.thread.start()

    def close(self) -> None:
        """Stop watching."""
        self.ended.set()
        self.thread.join(5)

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
            except RuntimeError:  # the store is gone, and with it rank 0 or the agent
                if self.ended.is_set() or self.place.is_ending:
                    return
                text = f"rank {self.place.rank} on {self.place.host} lost the process that started the training"
                print(f"error: {text}", file=sys.stderr, flush=True)
                self._end(text, RankError.exit_code)

    def _look(self) -> None:
        """Act on a fault, or find one."""
        fault = self.read_fault()
        now = time.monotonic()
        if fault is not None:
            self.faulty_since = self.faulty_since or now
            if not self.place.is_ending and now - self.faulty_since > GRACE_SECONDS:
                self._end(fault["text"], fault["code"])
            return
        for rank in range(self.place.size) if self.place.rank == 0 else (0,):
            if rank == self.place.rank or not self.store.check([f"rank/{rank}"]):
                continue
            text = self.store.get(f"rank/{rank}").decode()
            if self.seen.get(rank, ("", 0.0))[0] != text:
                self.seen[rank] = text, now
            told = json.loads(text)
            moved = (told["step"], told["moves"], told["waiting"])
            if self.moved.get(rank, (None, 0.0))[0] != moved:
                self.moved[rank] = moved, now
            silent, still = now - self.seen[rank][1], now - self.moved[rank][1]
            if silent > min(SILENT_SECONDS, self.timeout) and not self.store.check([f"ended/{rank}"]):
                self.find_fault(f"{self.describe(rank)} has not answered for {silent:.0f} s")
            elif self.place.is_waiting and not told["waiting"] and still > self.timeout:
                self.find_fault(f"{self.describe(rank)} has not moved for {still:.0f} s, and others wait for it")

    def describe(self, rank: int) -> str:
        """Return a rank by number, host, process and the last step that it told of."""
        try:
            told = json.loads(self.store.get(f"rank/{rank}").decode()) if self.store.check([f"rank/{rank}"]) else {}
        except RuntimeError:
            told = {}
        if not told:
            return f"rank {rank}"
        step = max(told["step"], self.place.step)  # ranks are never a step apart; what was told may be old
        return f"rank {rank} (host {told['host']}, process {told['process']}, step {step})"

    def read_fault(self) -> dict[str, Any] | None:
        """Return the first fault that any rank has written."""
        if not self.store.check([FAULT]):
            return None
        fault: dict[str, Any] = json.loads(self.store.get(FAULT).decode())
        return fault

    def find_fault(self, text: str) -> None:
        """Write a fault that was found in another rank, and say so, once."""
        if self.write_fault(text, RankError.exit_code):
            print(f"error: {text}. Go on from the last checkpoint with --resume", file=sys.stderr, flush=True)

    def write_fault(self, text: str, code: int) -> bool:
        """Write a fault that all ranks end for; return whether it is the first."""
        own = json.dumps({"rank": self.place.rank, "text": text, "code": code, "mark": os.urandom(4).hex()})
        return bool(self.store.compare_set(FAULT, "", own).decode() == own)

    def find_lost(self) -> list[int]:
        """Return the ranks that say nothing for two seconds, other than those that have ended in order."""
        keys = [(rank, f"rank/{rank}") for rank in range(self.place.size) if rank != self.place.rank]
        before = {rank: self.store.get(key) for rank, key in keys if self.store.check([key])}
        time.sleep(4 * BEAT_SECONDS)
        return [
            rank
            for rank, key in keys
            if rank in before and self.store.get(key) == before[rank] and not self.store.check([f"ended/{rank}"])
        ]

    def _end(self, text: str, code: int) -> None:
        """End this process, from this thread."""
        self.on_lost(text)
        os._exit(code)
