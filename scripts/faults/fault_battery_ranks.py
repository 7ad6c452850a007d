"""Two processes that train together and one of them is killed or told to stop, for `scripts/faults/fault_battery.py`.

Each rank is a fork like every other command of the battery, with the variables that torchrun sets; gloo connects them.
The first rank writes the run. The other one writes a record of its own into a temporary folder, a line per step, so its
file operations are places for a kill too.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scripts.faults.fault_battery_process import KILL, SIGNAL, Ended, Fault, Running, start
from scripts.faults.fault_battery_runs import (
    Battery,
    Verdict,
    check_run,
    failure_of,
    lines_of,
    weights_of,
)

SIZE = 2
LOST = 9
"""The exit code of a rank that has lost another one."""
KILLS, STOPS = (16, 8), (3, 3)
"""Cases of each rank."""
PATIENCE = "parallel.timeout=25"
"""A rank that says nothing for so many seconds is lost. Most of a case's time is this waiting."""
AT_A_TIME = 2
"""Cases that a core has at the same time, beside those of other kinds, since they wait."""


def train_together(
    battery: Battery,
    place: Path,
    runs: Path,
    options: list[str],
    faults: dict[int, tuple[int, int, int]],
) -> list[Ended]:
    """Run `mpt train` on every rank to its end. `faults` has, by rank, an operation, an action and its detail."""
    return [one.wait() for one in begin_together(battery, place, runs, options, faults)]


def begin_together(
    battery: Battery,
    place: Path,
    runs: Path,
    options: list[str],
    faults: dict[int, tuple[int, int, int]],
    before: Callable[[], None] = lambda: None,
) -> list[Running]:
    """Start `mpt train` on every rank, each of which calls `before` first."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    running = []
    for rank in range(SIZE):
        own = place / f"rank{rank}"
        own.mkdir(exist_ok=True)
        folder = runs if rank == 0 else own
        at, action, detail = faults.get(rank, (-1, 0, 0))
        work = as_rank(rank, port, own, [*battery.words("train", runs), PATIENCE, *options], before)
        running.append(start(work, place / f"rank{rank}.log", Fault(folder, at, action, detail)))
    return running


def as_rank(
    rank: int, port: int, temporary: Path, words: list[str], before: Callable[[], None]
) -> Callable[[], None]:
    """Return what runs a command line as one of several processes."""

    def work() -> None:
        from mpt.cli import main

        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": SIZE,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        os.environ.update({name: str(value) for name, value in place.items()})
        tempfile.tempdir = str(temporary)
        before()
        main(words)

    return work


def rank_at_operation(
    battery: Battery, place: Path, rank: int, action: int, detail: int, at: int
) -> Verdict:
    """Let a rank meet a fault at one of its file operations, then resume both and compare with a run never stopped."""
    runs = place / "runs"
    runs.mkdir()
    ends = train_together(battery, place, runs, [], {rank: (at, action, detail)})
    for number, ended in enumerate(ends):
        expected = (0, -signal.SIGKILL) if (number, action) == (rank, KILL) else (0, LOST)
        expected += (128 + detail, -detail) if action == SIGNAL else ()
        if bad := failure_of(ended, expected):
            return bad[0], f"rank {number}: {bad[1]}"
    return resume_and_compare(battery, place, ["--resume"], battery.weights_of_ranks, "ranks")


def resume_and_compare(
    battery: Battery, place: Path, words: list[str], weights: str, lines: str
) -> Verdict:
    """Resume both ranks and compare with the run of them that was never stopped."""
    runs = place / "runs"
    for rank, ended in enumerate(train_together(battery, place, runs, words, {})):
        if bad := failure_of(ended, (0,)):
            return ("lost" if bad[0] == "silent" else bad[0]), f"rank {rank}, --resume: {bad[1]}"
    reference = replace(battery, weights={4: weights}, lines={"train": battery.lines[lines]})
    return check_run(reference, runs, "train")


def rank_cases(battery: Battery) -> list[tuple[object, ...]]:
    """Train undisturbed, then choose operations of either rank."""
    place = battery.folder / "ranks"
    runs = place / "runs"
    runs.mkdir(parents=True)
    ends = train_together(battery, place, runs, [], {})
    assert [one.code for one in ends] == [0] * SIZE, [one.text for one in ends]
    battery.weights_of_ranks, battery.lines["ranks"] = (
        weights_of(runs / "run"),
        lines_of(runs / "run"),
    )
    generator = random.Random(0)
    cases: list[tuple[object, ...]] = []
    for rank, ended in enumerate(ends):
        places = range(1, ended.operations + 1)
        kills = sorted(generator.choices(places, k=KILLS[rank]))
        cases += [(rank_at_operation, rank, KILL, 0, at) for at in kills]
        stops = sorted(generator.choices(places, k=STOPS[rank]))
        cases += [(rank_at_operation, rank, SIGNAL, int(signal.SIGTERM), at) for at in stops]
    return cases
