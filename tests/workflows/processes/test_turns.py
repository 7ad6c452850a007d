"""Several things at a time: in order, never more than allowed, and all ended by a failure or a signal."""

import os
import signal
import threading
import time
from functools import partial

import pytest

from mpt.errors import Interrupted, MptError
from mpt.workflows.processes import turns
from mpt.workflows.processes.turns import HostMemory, Stop, take_turns


def wait_for_stop(stop: Stop) -> None:
    until = time.monotonic() + 30
    while not stop.requested:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_they_begin_in_order() -> None:
    begun: list[int] = []

    def work(number: int, slot: int, stop: Stop) -> None:
        begun.append(number)

    take_turns([partial(work, number) for number in range(12)], 1, lambda index, result: None)
    assert begun == list(range(12))


def test_they_are_never_more_than_so_many_and_each_slot_is_one_s_own() -> None:
    lock, used, most = threading.Lock(), set(), 0

    def work(number: int, slot: int, stop: Stop) -> int:
        nonlocal most
        with lock:
            assert slot not in used
            used.add(slot)
            most = max(most, len(used))
        time.sleep(0.005)
        with lock:
            used.remove(slot)
        return -number

    ended: dict[int, int] = {}
    take_turns(
        [partial(work, number) for number in range(12)],
        3,
        lambda index, result: ended.update({index: result}),
    )
    assert most == 3
    assert ended == {number: -number for number in range(12)}


def test_a_failure_ends_the_others_and_is_what_is_raised() -> None:
    ended = []

    def bad(slot: int, stop: Stop) -> None:
        raise MptError("a run failed")

    def good(slot: int, stop: Stop) -> None:
        wait_for_stop(stop)
        ended.append(slot)
        raise Interrupted("told to end", signal.SIGTERM)

    with pytest.raises(MptError, match="a run failed"):
        take_turns([good, bad, good], 2, lambda index, result: None)
    assert ended == [0], "the one that went on was told, and the next one never begun"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_and_is_raised_with_its_number(number: int) -> None:
    ended = []

    def work(slot: int, stop: Stop) -> None:
        if slot == 1:
            os.kill(os.getpid(), number)
        wait_for_stop(stop)
        ended.append(slot)

    with pytest.raises(Interrupted) as caught:
        take_turns([work] * 5, 2, lambda index, result: None)
    assert caught.value.exit_code == 128 + number
    assert sorted(ended) == [0, 1]


def test_memory_that_holds_one_is_given_to_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "available_bytes", lambda: 1000)
    for used, expected in ((400, 2), (600, 1)):
        memory, running, most = HostMemory(), [], []

        def work(
            slot: int,
            stop: Stop,
            used: int,
            memory: HostMemory,
            running: list[int],
            most: list[int],
        ) -> None:
            running.append(slot)
            time.sleep(0.01)
            most.append(len(running))
            running.remove(slot)
            memory.see(used)

        works = [partial(work, used=used, memory=memory, running=running, most=most)] * 4
        take_turns(works, 4, lambda index, result: None, memory.allows)
        assert most[0] == 1, "nothing is known yet: one alone"
        assert max(most) == expected
    monkeypatch.setattr(turns, "available_bytes", lambda: None)
    assert memory.allows() is None
