"""A process from which runs are forked, asked and answered by lines."""

import io
import sys
from types import ModuleType
from typing import Any

import pytest

from mpt.workflows import warm_process
from mpt.workflows.warm_process import GONE, WarmProcess


class Stream(io.BytesIO):
    """What a process says, or takes in, without a process."""

    def write(self, line: Any) -> int:
        if self.getvalue():
            raise BrokenPipeError
        return super().write(line)


class Process:
    """A process that has said all it will say."""

    def __init__(self, answers: bytes) -> None:
        self.stdin, self.stdout = Stream(), io.BytesIO(answers)


def begin(answers: bytes) -> WarmProcess:
    warm = WarmProcess()
    warm.process = Process(answers)  # type: ignore[assignment]
    return warm


def fail(process: int) -> None:
    raise AssertionError("it ended long ago")


def test_a_run_that_ends_before_its_start_is_read_is_not_waited_for_without_end() -> None:
    """On a busy machine both lines are there when the first is read."""
    warm = begin(b"0 started 17\n0 ended 2\n")
    asked = warm.ask({})
    warm.read()
    assert (asked.started.result(), asked.ended.result()) == (17, 2)
    assert warm.run(["list"], fail) == GONE, "the process has ended since"


def test_a_process_that_ends_without_an_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = begin(b"0 started 17\n")
    asked = warm.ask({})
    warm.read()
    assert asked.started.result() == 17
    with pytest.raises(BrokenPipeError):
        asked.ended.result()
    monkeypatch.setattr(warm_process.WarmProcess, "ask", lambda self, request: asked)
    assert warm.run(["list"], fail) == GONE


def test_what_a_fork_imported_of_libraries_is_told_and_imported_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    before = frozenset(sys.modules) - {"mpt.errors", "wave"}
    for name in ("mpt.parts.own", "mpt.__main__", "mpt.a_made_up_name"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    told = warm_process.imported_since(before).split()
    assert told == ["mpt.errors", "mpt.a_made_up_name"], "neither what is not a library's nor a user's own parts"
    monkeypatch.delitem(sys.modules, "mpt.a_made_up_name")
    monkeypatch.delitem(sys.modules, "mpt.losses.focal", raising=False)
    monkeypatch.setattr(warm_process.gc, "freeze", lambda: None)
    warm_process.import_too([*told, "mpt.losses.focal"])
    assert "mpt.losses.focal" in sys.modules
    monkeypatch.setattr(warm_process, "MOST_TOLD_BYTES", 5)
    assert warm_process.imported_since(before) == "", "more than the pipe holds"
