"""The loss of the first rank is told and recorded once, whether or not the store of the ranks goes with it."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from mpt.parallel import watch
from mpt.parallel.place import Place

from .forked import free_port

FIRST = "rank 0 (host node7, process 7, step 4)"
TOLD = {"host": "node7", "process": 7, "step": 4, "moves": 9, "waiting": False, "beat": 1}


class Survivors:
    """The watches of ranks that wait for the first one, which keeps the store and does nothing.

    With a `port` another process is the first one.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        ranks: tuple[int, ...],
        timeout: float,
        port: int | None = None,
    ) -> None:
        monkeypatch.setattr(watch, "BEAT_SECONDS", 0.02)
        monkeypatch.setattr(watch.os, "_exit", self.end)
        self.codes: list[int] = []
        self.recorded: list[str] = []
        if port is None:
            port = free_port()
            self.store: Any = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            PrefixStore("mpt/0", self.store).set("rank/0", json.dumps(TOLD))
        places = [
            Place(rank, 3, rank, "127.0.0.1", port, on_machine=3, step=4, is_waiting=True)
            for rank in ranks
        ]
        self.watches = [watch.Watch(place, timeout) for place in places]
        for one in self.watches:
            one.on_lost = self.recorded.append
            one.start()

    def end(self, code: int) -> None:
        """Note that a process would have ended, and end its watch."""
        self.codes.append(code)
        here = threading.current_thread()
        next(one for one in self.watches if here in (one.thread, one.guard)).ended.set()

    def await_ends(self) -> list[int]:
        """Return the codes that all have ended with."""
        for one in self.watches:
            one.ended.wait(20)
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


def test_a_first_rank_that_is_stopped_with_the_store_in_it_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    port, ready = free_port(), multiprocessing.get_context("fork").Event()
    keeper = multiprocessing.get_context("fork").Process(target=keep_store, args=(port, ready))
    keeper.start()
    try:
        assert ready.wait(20)
        survivors = Survivors(monkeypatch, (1,), timeout=0.4, port=port)
        time.sleep(0.1)
        assert keeper.pid is not None
        os.kill(keeper.pid, signal.SIGSTOP)
        assert survivors.await_ends() == [9]
        (text,) = survivors.recorded
        assert re.match(
            re.escape(FIRST) + r" has not answered for \d s, and with it the store", text
        )
        assert capfd.readouterr().err.count("error: ") == 1
    finally:
        keeper.kill()
        keeper.join()


def keep_store(port: int, ready: Any) -> None:
    """Keep the store as a first rank does that tells of itself all the time."""
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for beat in itertools.count():
        PrefixStore("mpt/0", store).set("rank/0", json.dumps(TOLD | {"beat": beat}))
        ready.set()
        time.sleep(0.02)


def test_a_rank_that_was_stopped_itself_finds_nobody_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0], sleep=time.sleep)
    monkeypatch.setattr(watch, "time", clock)
    survivors = Survivors(monkeypatch, (1,), timeout=60)
    time.sleep(0.1)
    later[0] = 1000.0
    time.sleep(0.3)
    assert (survivors.codes, survivors.watches[0].fault) == ([], None)
    survivors.watches[0].close()
