"""The loss of the first rank is told and recorded once, whether or not the store of the ranks goes with it."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from mpt.parallel import watch
from mpt.parallel.place import Place

from .forked import free_port

FIRST = "rank 0 (host node7, process 7, step 4)"


class Survivors:
    """The watches of ranks that wait for the first one, which keeps the store and does nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...], timeout: float) -> None:
        monkeypatch.setattr(watch, "BEAT_SECONDS", 0.02)
        monkeypatch.setattr(watch.os, "_exit", self.end)
        self.codes: list[int] = []
        self.recorded: list[str] = []
        port = free_port()
        self.store: Any = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        told = {"host": "node7", "process": 7, "step": 4, "moves": 9, "waiting": False, "beat": 1}
        PrefixStore("mpt/0", self.store).set("rank/0", json.dumps(told))
        places = [Place(rank, 3, rank, "127.0.0.1", port, on_machine=3, step=4, is_waiting=True) for rank in ranks]
        self.watches = [watch.Watch(place, timeout) for place in places]
        for one in self.watches:
            one.on_lost = self.recorded.append
            one.start()

    def end(self, code: int) -> None:
        """Note that a process would have ended, and end its watch."""
        self.codes.append(code)
        next(one for one in self.watches if one.thread is threading.current_thread()).ended.set()

    def await_ends(self) -> list[int]:
        """Return the codes that all have ended with."""
        for one in self.watches:
            one.thread.join(20)
        return self.codes


def test_the_first_rank_that_took_the_store_with_it_is_named_and_recorded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    survivors = Survivors(monkeypatch, (1, 2), timeout=60)
    time.sleep(0.2)
    survivors.store = None
    assert survivors.await_ends() == [9, 9]
    (text,) = survivors.recorded
    assert text.startswith(f"{FIRST} was lost")
    assert f"error: {FIRST} was lost" in capfd.readouterr().err


def test_a_first_rank_that_hangs_is_recorded_once_by_those_it_leaves(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.1)
    survivors = Survivors(monkeypatch, (1, 2), timeout=0.2)
    assert survivors.await_ends() == [9, 9]
    (text,) = survivors.recorded
    assert text.startswith(f"{FIRST} has not answered for ")
    assert capfd.readouterr().err.count("error: ") == 1


def test_a_first_rank_that_hangs_is_recorded_though_it_ends_before_the_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    survivors = Survivors(monkeypatch, (1,), timeout=0.2)
    until = time.monotonic() + 10
    while survivors.watches[0].faulty_since is None and time.monotonic() < until:
        time.sleep(0.01)
    survivors.store = None
    assert survivors.await_ends() == [9]
    (text,) = survivors.recorded
    assert text.startswith(f"{FIRST} has not answered for ")
    assert capfd.readouterr().err.count("error: ") == 1
