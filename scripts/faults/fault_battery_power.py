"""Power that fails at any moment of a command, simulated, for `scripts/faults/fault_battery.py`.

A command runs to its end while its folder is looked at before each of its file operations. From what was synced by
then follows every state that a journaling file system may show after a power loss at that moment:

- names (files made, renamed, removed) come back as they were at this moment or an earlier one, in the order of the
  operations, but no earlier than the last change that an fsync of its folder has made durable;
- the content of a file is that of its last fsync. What was written since is lost, or half of it is there, or zeros in
  its place, or all of it.

Each state that differs from the others is laid out in a folder, and the command that a user gives next must come to
what it would have come to without the loss.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.faults.fault_battery_process import start
from scripts.faults.fault_battery_runs import (
    STEPS,
    Battery,
    Verdict,
    again,
    begin,
    lines_of,
    weights_of,
)

EVENTS = (
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
)
"""What Python reports of operations before it does them."""
CONTENTS = ("lost", "torn", "zeros", "kept")
SCENARIOS = ("train", "extend", "earlier")

Names = dict[str, int]
"""Path below the folder -> its file's number; of a folder it is negative."""
State = dict[str, bytes | None]
"""Path below the folder -> its content, None for a folder."""


@dataclass
class Moment:
    """The folder before an operation."""

    names: Names
    contents: dict[int, bytes]
    synced: dict[int, bytes]
    """The content of each file at its last fsync."""
    oldest: int
    """The earliest moment whose names may be what comes back."""


@dataclass
class PowerRecorder:
    """Looks at a folder before each file operation of this process."""

    folder: Path
    moments: list[Moment] = field(default_factory=list)
    synced: dict[int, bytes] = field(default_factory=dict)
    oldest: int = 0
    numbers: dict[int, int] = field(default_factory=dict)
    """Inode -> number of the file that has it; a file system may give an inode again."""
    unused: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    is_looking: bool = False
    lock: Any = field(default_factory=threading.RLock)

    def start(self) -> None:
        """Begin; what is there already is durable."""
        self.look()
        self.synced.update(self.moments[0].contents)
        self.moments[0].synced.update(self.synced)

    def look(self) -> None:
        """Take down the folder as it is, if anything has changed."""
        with self.lock:
            if self.is_looking:
                return
            self.is_looking = True
            try:
                tree, files = read_tree(self.folder)
            finally:
                self.is_looking = False
            known = self.numbers
            self.numbers = {
                one: known[one] if one in known else next(self.unused)
                for one in (*files, *tree.values())
            }
            names = {
                path: self.numbers[inode] * (1 if inode in files else -1)
                for path, inode in tree.items()
            }
            contents = {self.numbers[inode]: data for inode, data in files.items()}
            last = self.moments[-1] if self.moments else None
            same = last is not None and (names, contents) == (last.names, last.contents)
            if last is None or not same or (self.synced, self.oldest) != (last.synced, last.oldest):
                self.moments.append(Moment(names, contents, dict(self.synced), self.oldest))

    def note_sync(self, inode: int, folder: str | None) -> None:
        """Take down what an fsync of a file, or of the folder of that path, has made durable."""
        with self.lock:
            self.look()
            if folder is None:
                number = self.numbers.get(inode)
                if number is not None:
                    self.synced[number] = self.moments[-1].contents[number]
                return
            below = os.path.relpath(folder, self.folder)
            if not below.startswith(".."):
                self.oldest = max(self.oldest, self.last_change(below))

    def last_change(self, folder: str) -> int:
        """Return the moment at which the names in a folder became what they are."""
        now = entries(self.moments[-1].names, folder)
        number = len(self.moments) - 1
        while number > 0 and entries(self.moments[number - 1].names, folder) == now:
            number -= 1
        return number

    def states(self) -> list[State]:
        """Return every state that may come back, each once; the last is that of a loss after the end."""
        self.look()
        found: dict[str, State] = {}
        for number, moment in enumerate(self.moments):
            for earlier in range(number, moment.oldest - 1, -1):
                for kind in CONTENTS:
                    state = come_back(self.moments[earlier].names, moment, kind)
                    found.setdefault(digest(state), state)
        last = self.moments[-1]
        end = come_back(self.moments[last.oldest].names, last, "lost")
        found.pop(digest(end), None)
        return [*found.values(), end]


def watch_operations(
    look: Callable[[], object], note_sync: Callable[[int, str | None], object]
) -> None:
    """Call `look` before each file operation of this process, and `note_sync` after each fsync."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *arguments: Any) -> Any:
            look()
            result = function(descriptor, *arguments)
            if function.__name__ != "write":
                found = os.fstat(descriptor)
                path = (
                    os.readlink(f"/proc/self/fd/{descriptor}")
                    if stat.S_ISDIR(found.st_mode)
                    else None
                )
                note_sync(found.st_ino, path)
            return result

        return call

    sys.addaudithook(lambda event, arguments: look() if event in EVENTS else None)
    for name in ("write", "fsync", "fdatasync"):
        setattr(os, name, watched(getattr(os, name)))


def read_tree(folder: Path) -> tuple[Names, dict[int, bytes]]:
    """Return the names below a folder, with inodes, and the contents of inodes."""
    names: Names = {}
    contents: dict[int, bytes] = {}
    for place, folders, files in os.walk(folder):
        for name in folders:
            path = os.path.join(place, name)
            with contextlib.suppress(FileNotFoundError):
                names[os.path.relpath(path, folder)] = os.lstat(path).st_ino
        for name in files:
            path = os.path.join(place, name)
            try:
                number = os.lstat(path).st_ino
                with open(path, "rb") as file:
                    contents[number] = file.read()
            except FileNotFoundError:  # another thread works on
                continue
            names[os.path.relpath(path, folder)] = number
    return names, contents


def entries(names: Names, folder: str) -> Names:
    """Return the names in a folder itself."""
    return {
        path: number for path, number in names.items() if (os.path.dirname(path) or ".") == folder
    }


def come_back(names: Names, moment: Moment, kind: str) -> State:
    """Return the names of an earlier moment with what is left of contents after a loss at this one."""
    state: State = {}
    for path, number in names.items():
        if number < 0:
            state[path] = None
            continue
        synced = moment.synced.get(number, b"")
        state[path] = left_of(synced, moment.contents.get(number, synced), kind)
    return state


def left_of(synced: bytes, written: bytes, kind: str) -> bytes:
    """Return what a file holds after a loss, of what was synced and what was written."""
    if kind == "lost" or synced == written:
        return synced
    if kind == "kept":
        return written
    same = len(synced) if written.startswith(synced) else 0
    if kind == "torn":
        return written[: (same + len(written)) // 2]
    return written[:same] + bytes(len(written) - same)


def digest(state: State) -> str:
    """Return a hash of a state."""
    parts = (
        f"{path}\0".encode() + (b"/" if data is None else data) + b"\0"
        for path, data in sorted(state.items())
    )
    return hashlib.sha256(b"".join(parts)).hexdigest()


def lay_out(state: State, folder: Path) -> None:
    """Make a folder what a state says."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, data in sorted(state.items(), key=lambda one: one[0].count("/")):
        if data is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
    for path, data in state.items():
        if data is not None:
            (folder / path).write_bytes(data)


def record(battery: Battery, scenario: str) -> int:
    """Run a command to its end and write down the states; return how many there are."""
    place = battery.folder / "power" / scenario
    runs = begin(battery, place, scenario)

    def work() -> None:
        from mpt.cli import main

        recorder = PowerRecorder(runs)
        recorder.start()
        watch_operations(recorder.look, recorder.note_sync)
        try:
            main(battery.words(scenario, runs))
        finally:
            write_states(recorder.states(), place)

    ended = start(work, place / "recorded.log").wait()
    assert ended.code == 0, ended.text
    return len(json.loads((place / "states.json").read_text()))


def write_states(states: list[State], place: Path) -> None:
    """Write states as lists of names, and every content once."""
    blobs = place / "blobs"
    blobs.mkdir()
    listed = []
    for state in states:
        names: dict[str, str | None] = {}
        for path, data in state.items():
            names[path] = None if data is None else hashlib.sha256(data).hexdigest()
            if data is not None and not (blobs / str(names[path])).exists():
                (blobs / str(names[path])).write_bytes(data)
        listed.append(names)
    (place / "states.json").write_text(json.dumps(listed))


def read_state(place: Path, number: int) -> State:
    """Return one of the states that were written down."""
    listed = json.loads((place / "states.json").read_text())[number]
    return {
        path: None if name is None else (place / "blobs" / name).read_bytes()
        for path, name in listed.items()
    }


def after_power_loss(
    battery: Battery, place: Path, scenario: str, number: int, is_last: bool
) -> Verdict:
    """Lay out a state after a loss and give the command that a user gives next."""
    runs = place / "runs"
    lay_out(read_state(battery.folder / "power" / scenario, number), runs)
    if is_last:  # the command had ended: what it said is there must be there
        if weights_of(runs / "run") != battery.weights[STEPS[scenario]]:
            return "lost", "the last checkpoint of a training that had ended"
        if lines_of(runs / "run") != battery.lines[scenario]:
            return "lost", "lines of a training that had ended"
    return again(battery, place, runs, scenario)


def power_cases(battery: Battery) -> list[tuple[object, ...]]:
    """Record each command, and return a case for every state."""
    cases: list[tuple[object, ...]] = []
    for scenario in SCENARIOS:
        count = record(battery, scenario)
        cases += [
            (after_power_loss, scenario, number, number == count - 1) for number in range(count)
        ]
    return cases
