"""A process from which runs are forked, asked and answered by lines."""

import io
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
