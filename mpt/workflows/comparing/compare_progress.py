"""How far a comparison is, read from the files of its runs: whoever trains them, and however many at a time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpt.foreign.files import open_foreign
from mpt.foreign.text import harmless, unguarded
from mpt.report.units import show_seconds

TAIL_BYTES = 8192
EVERY_SECONDS = 15.0
"""Between two lines if there is no terminal."""
PROBE_SECONDS = 120


@dataclass(frozen=True)
class Expected:
    """The runs of a comparison: folder -> its total number of steps."""

    steps: Mapping[Path, int]

    def done(self) -> dict[Path, int]:
        """Return the steps that each run has logged so far."""
        return {path: min(last_step(path), steps) for path, steps in self.steps.items()}


def last_step(run: Path) -> int:
    """Return the last step in a run's log; 0 if there is none yet."""
    if (run / "summary.json").is_file():
        return sys.maxsize
    try:
        with open_foreign(run / "metrics.jsonl") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (
            ValueError,
            KeyError,
            TypeError,
            OverflowError,
            RecursionError,
        ):  # the first line is cut, the last may be half written
            continue
    return 0


@contextlib.contextmanager
def shown(steps: Mapping[Path, int], *, quiet: bool) -> Iterator[None]:
    """Log within the block how far the runs are and about how long the rest takes."""
    if quiet:
        yield
        return
    expected, ended = Expected(steps), threading.Event()
    thread = threading.Thread(target=_tell, args=(expected, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _tell(expected: Expected, ended: threading.Event) -> None:
    terminal = sys.stdout.isatty()
    begun, first = time.monotonic(), expected.done()
    told = -1
    while not ended.wait(1.0 if terminal else EVERY_SECONDS):
        done = expected.done()
        count = sum(done.values())
        if count == told and not terminal:
            continue
        told = count
        line = describe(expected, first, done, time.monotonic() - begun)
        if terminal:
            print(f"\r\x1b[K{harmless(line)}", end="", flush=True, file=unguarded(sys.stdout))
        else:
            print(line, flush=True)
    if terminal and told >= 0:
        print("\r\x1b[K", end="", flush=True, file=unguarded(sys.stdout))


def describe(
    expected: Expected, first: Mapping[Path, int], done: Mapping[Path, int], seconds: float
) -> str:
    """Return a line: the runs that are under way, those that are done, and the rest."""
    steps = expected.steps
    under_way = [
        f"{path.name} step {done[path]} of {steps[path]}"
        for path in steps
        if 0 < done[path] < steps[path]
    ]
    finished = sum(done[path] >= steps[path] > 0 for path in steps)
    now = sum(done.values()) - sum(first.values())
    left = sum(steps.values()) - sum(done.values())
    known = now and left and all(steps.values())
    rest = f", about {show_duration(seconds * left / now)} left" if known else ""
    waiting = "starting" if finished < len(steps) else "evaluating"
    return f"{finished} of {len(steps)} runs done; {', '.join(under_way) or waiting}{rest}"


def show_duration(seconds: float) -> str:
    """Write a duration for reading: seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class Pace:
    """The length of a run and the cost of a step."""

    steps: int
    step_seconds: float


def probe(file: Path, allow: Sequence[str]) -> Pace | None:
    """Return the pace of a configuration from a few steps in a process of its own; None if they fail."""
    command = [sys.executable, "-m", "mpt", "doctor", str(file), "--only", "speed", "--json"]
    command += [word for package in allow for word in ("--allow", package)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
        tables = json.loads(done.stdout)["sections"][0]["tables"]
        seconds = (
            sum(
                row["milliseconds"]
                for row in tables["step"]
                if row["part"] in ("data", "whole step")
            )
            / 1000
        )
        return Pace(int(tables["run"][0]["steps"]), seconds)
    except (OSError, ValueError, KeyError, IndexError, subprocess.TimeoutExpired):
        return None


def announce(
    runs: int, at_most: int, pace: Pace | None, turns: Callable[[int], int] = lambda runs: runs
) -> str:
    """Log beforehand the trainings ahead and their approximate time. `turns` returns how many runs' time that many
    runs take.
    """
    more = f", up to {at_most} if these do not decide" if at_most > runs else ""
    if pace is None:
        return f"{runs} runs{more}"
    one = pace.step_seconds * pace.steps
    most = f", {show_duration(one * turns(at_most))} at most" if at_most > runs else ""
    return (
        f"{runs} runs of {pace.steps} steps{more}. A step takes {show_seconds(pace.step_seconds)}, a run about "
        f"{show_duration(one)}, all {show_duration(one * turns(runs))}{most}; starts and evaluations not counted"
    )
