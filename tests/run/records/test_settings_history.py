"""Which settings a run had at which step, from its folder alone."""

from pathlib import Path

import pytest

from mpt.run.records.layout import RunDirectory, create_run
from mpt.run.records.settings_history import earlier_settings, replace_settings, settings_at

pytestmark = pytest.mark.tier("fast")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = create_run(tmp_path, "run")
    made.config_path.write_text("a")
    return made


def told(run: RunDirectory, *steps: int) -> list[str]:
    return [settings_at(run, step).read_text() for step in steps]


def test_every_step_s_settings_can_be_told_after_two_changes(run: RunDirectory) -> None:
    replace_settings(run, 10, "b")
    replace_settings(run, 20, "c")
    assert told(run, 1, 10, 11, 20, 21) == ["a", "a", "b", "b", "c"]


def test_the_same_settings_leave_no_history(run: RunDirectory) -> None:
    replace_settings(run, 10, "a")
    assert not earlier_settings(run)


def test_settings_that_trained_no_step_are_dropped(run: RunDirectory) -> None:
    replace_settings(run, 10, "b")
    replace_settings(run, 10, "c")
    assert told(run, 10, 11) == ["a", "c"]
    replace_settings(run, 10, "a")
    assert told(run, 10, 11) == ["a", "a"]
    assert not earlier_settings(run)


def test_a_change_before_the_first_step_leaves_no_history(run: RunDirectory) -> None:
    replace_settings(run, 0, "b")
    assert told(run, 1) == ["b"]
    assert not earlier_settings(run)


def test_going_back_drops_what_held_for_the_steps_taken_back(run: RunDirectory) -> None:
    replace_settings(run, 10, "b")
    replace_settings(run, 20, "c")
    replace_settings(run, 15, "d")
    assert told(run, 10, 11, 15, 16) == ["a", "b", "b", "d"]
    assert list(earlier_settings(run)) == [10, 15]


def test_a_missing_file_is_no_obstacle(run: RunDirectory) -> None:
    run.config_path.unlink()
    replace_settings(run, 10, "b")
    assert told(run, 10) == ["b"]
