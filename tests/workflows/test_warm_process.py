"""A process from which runs are forked, asked and answered by lines."""

import time

import pytest

from mpt.workflows.warm_process import WarmProcess


def test_a_run_that_ends_before_its_start_is_read_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine both lines are there when the first is read."""
    answer = WarmProcess.answer

    def late(self: WarmProcess) -> str:
        time.sleep(1.5)
        return answer(self)

    asked = []

    def wait(process: int) -> None:
        asked.append(process)
        assert len(asked) < 100, "it ended long ago"

    with WarmProcess() as warm:
        if not warm.begin():
            pytest.skip("this torch is built for a device: no run is a fork")
        monkeypatch.setattr(WarmProcess, "answer", late)
        code, words = warm.run(["list", "no such kind"], wait)
    assert code == 2
    assert "no such kind" in words
