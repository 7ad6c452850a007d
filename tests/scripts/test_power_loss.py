"""What a power loss leaves is simulated from what was synced: durable writes are whole, others are found out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mpt.run.process.files import write_atomically
from scripts.faults.fault_battery_power import (
    PowerRecorder,
    State,
    left_of,
    read_state,
    watch_operations,
    write_states,
)


def states_of(place: Path, durable: bool) -> list[State]:
    """Return the states that replacing a file may leave, recorded in a fork: hooks of Python stay for good."""
    folder = place / "folder"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"old")
    child = os.fork()
    if child == 0:
        recorder = PowerRecorder(folder)
        recorder.start()
        watch_operations(recorder.look, recorder.note_sync)
        write_atomically(folder / "a", b"new content", durable=durable)
        write_states(recorder.states(), place)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    count = len(json.loads((place / "states.json").read_text()))
    return [read_state(place, number) for number in range(count)]


def test_a_file_replaced_durably_is_the_old_or_the_new_one_and_the_new_one_in_the_end(
    tmp_path: Path,
) -> None:
    states = states_of(tmp_path, durable=True)
    assert {state["a"] for state in states} == {b"old", b"new content"}
    assert states[-1]["a"] == b"new content"


def test_a_file_replaced_without_a_sync_may_be_anything(tmp_path: Path) -> None:
    states = states_of(tmp_path, durable=False)
    assert {state["a"] for state in states} == {b"old", b"", b"new c", bytes(11), b"new content"}
    assert states[-1]["a"] == b"old"


@pytest.mark.parametrize(
    ("kind", "left"),
    [("lost", b"one"), ("kept", b"one two"), ("torn", b"one t"), ("zeros", b"one\0\0\0\0")],
)
def test_of_what_was_appended_since_the_last_sync_anything_may_be_left(
    kind: str, left: bytes
) -> None:
    assert left_of(b"one", b"one two", kind) == left
