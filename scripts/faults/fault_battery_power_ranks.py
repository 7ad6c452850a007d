"""Power that fails at any moment of a training of two ranks, simulated, for `scripts/faults/fault_battery.py`.

Both ranks write a sharded checkpoint (`parallel.strategy: fsdp`), so what is durable depends on the syncs of two
processes. One recorder looks at the folder before each file operation of either: they ask for it by a socket, and wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from scripts.faults.fault_battery_power import (
    PowerRecorder,
    lay_out,
    read_state,
    watch_operations,
    write_states,
)
from scripts.faults.fault_battery_ranks import (
    SIZE,
    begin_together,
    resume_and_compare,
)
from scripts.faults.fault_battery_runs import (
    Battery,
    Verdict,
    lines_of,
    weights_of,
)

SHARDED = ["parallel.strategy=fsdp"]


def record_ranks(battery: Battery) -> int:
    """Train on all ranks to the end and write down the states; return how many there are."""
    place = battery.folder / "power" / "ranks"
    runs = place / "runs"
    runs.mkdir(parents=True)
    recorder = PowerRecorder(runs)
    recorder.start()
    address = str(place / "recorder")
    with Listener(address, "AF_UNIX", backlog=SIZE) as listener:
        running = begin_together(battery, place, runs, SHARDED, {}, asking(address))
        threads = [
            threading.Thread(target=answer, args=(listener.accept(), recorder)) for _ in range(SIZE)
        ]
        for thread in threads:
            thread.start()
        ends = [one.wait() for one in running]
        for thread in threads:
            thread.join()
    assert [one.code for one in ends] == [0] * SIZE, [one.text for one in ends]
    states = recorder.states()
    write_states(states, place)
    battery.weights_of_shards, battery.lines["shards"] = (
        weights_of(runs / "run"),
        lines_of(runs / "run"),
    )
    return len(states)


def asking(address: str) -> Callable[[], None]:
    """Return what lets a rank ask the recorder before each of its operations."""

    def begin() -> None:
        connection = Client(address, "AF_UNIX")
        lock, asks = threading.Lock(), threading.local()

        def ask(what: tuple[int, str | None] | None) -> None:
            if getattr(asks, "is_asking", False):
                return
            asks.is_asking = True
            try:
                with lock:
                    connection.send(what)
                    connection.recv()
            finally:
                asks.is_asking = False

        watch_operations(lambda: ask(None), lambda inode, folder: ask((inode, folder)))

    return begin


def answer(connection: Connection, recorder: PowerRecorder) -> None:
    """Look, or note a sync, as often as a rank asks."""
    while True:
        try:
            what = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        if what is None:
            recorder.look()
        else:
            recorder.note_sync(*what)
        connection.send(None)


def after_power_loss_of_ranks(battery: Battery, place: Path, number: int, is_last: bool) -> Verdict:
    """Lay out a state after a loss, and resume both ranks."""
    runs = place / "runs"
    lay_out(read_state(battery.folder / "power" / "ranks", number), runs)
    if is_last and weights_of(runs / "run") != battery.weights_of_shards:
        return "lost", "the last checkpoint of a training that had ended"
    words = [*SHARDED, "--resume"]
    return resume_and_compare(battery, place, words, battery.weights_of_shards, "shards")


def rank_power_cases(battery: Battery) -> list[tuple[object, ...]]:
    """Record the training, and return a case for every state."""
    count = record_ranks(battery)
    return [(after_power_loss_of_ranks, number, number == count - 1) for number in range(count)]
