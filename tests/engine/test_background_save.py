"""Runs that save beside the training keep every promise of runs that save between steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mpt.engine.loop.training import Training
from mpt.engine.step.step import Update
from mpt.errors import InputOutputError, Interrupted, NonFiniteError
from mpt.run.checkpoints import checkpoint
from mpt.run.checkpoints.retention import list_steps
from mpt.run.records.layout import open_run
from tests.engine.recovery.test_recovery import poison, settings, start


def slowly(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.3) -> list[threading.Thread]:
    """Let every save take a while; return the threads that wrote."""
    threads: list[threading.Thread] = []
    write = checkpoint.write_files

    def later(*arguments: Any) -> None:
        threads.append(threading.current_thread())
        time.sleep(seconds)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write_files", later)
    return threads


def test_both_ways_of_saving_leave_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = slowly(monkeypatch, 0)
    found = []
    for name, beside in (("between", False), ("beside", None)):
        run = open_run(
            start(tmp_path / name, train=settings(asynchronous_save=beside, keep_last=9))
        )
        assert list_steps(run) == [0, 2, 4, 6, 8]
        found.append(
            [(run.checkpoint_path(n) / "state.safetensors").read_bytes() for n in list_steps(run)]
        )
        assert {thread is threading.main_thread() for thread in threads} == {beside is False}
        threads.clear()
    assert found[0] == found[1]


def test_a_save_that_fails_ends_the_run_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = checkpoint.write_files, OSError(28, os.strerror(28))

    def fails_at_4(*arguments: Any) -> None:
        if arguments[4]["step"] == 4:
            raise full
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write_files", fails_at_4)
    with pytest.raises(
        InputOutputError, match="step-00000004 could not be written: the disk is full"
    ) as caught:
        start(tmp_path)
    assert caught.value.exit_code == 5
    assert list_steps(open_run(tmp_path / "run")) == [0, 2]
    assert [
        p.name for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.startswith(".")
    ] == []


def test_a_run_that_stops_by_itself_waits_for_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: call == 4)
    threads = slowly(monkeypatch)
    with pytest.raises(NonFiniteError):
        start(tmp_path, train=settings(on_non_finite="stop"))
    assert threads
    assert list_steps(open_run(tmp_path / "run"))[-1] == 4
    assert not any(thread.is_alive() for thread in threads)


def test_a_roll_back_returns_to_the_state_that_was_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: call == 4)
    slowly(monkeypatch)
    path = start(tmp_path)
    assert "rolled back from step 4 to 4" in (path / "events.jsonl").read_text()


def test_a_signal_while_a_state_is_written_loses_neither_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch)
    count = Training.count

    def interrupted(training: Training, phase: str, done: Update) -> None:
        # the third step, while the state after the second is written
        if training.progress.step == 2:
            assert training.saver.background.writing is not None
            os.kill(os.getpid(), signal.SIGTERM)
        count(training, phase, done)

    monkeypatch.setattr(Training, "count", interrupted)
    with pytest.raises(Interrupted, match="Step 3 is saved"):
        start(tmp_path)
    assert list_steps(open_run(tmp_path / "run"))[-2:] == [2, 3]
