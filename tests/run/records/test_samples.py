"""As many previews stay as the setting says, spread over the training; other files are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpt.run.records.layout import RunDirectory, create_run
from mpt.run.records.samples import thin

pytestmark = pytest.mark.tier("fast")


def write(run: RunDirectory, step: int, every: int, keep: int) -> bool:
    (run.samples / f"step-{step:08d}.png").touch()
    return thin(run, step, every, keep)


def steps_of(run: RunDirectory) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in run.samples.glob("step-*.png"))


def test_previews_get_farther_apart_as_there_are_more_and_the_newest_stays(tmp_path: Path) -> None:
    run = create_run(tmp_path, "run")
    sent = [step for step in range(0, 171, 10) if write(run, step, 10, 4)]
    assert steps_of(run) == [0, 80, 160, 170]
    assert sent == [0, 10, 20, 30, 40, 60, 80, 120, 160]


def test_few_previews_all_stay_and_so_do_files_of_others(tmp_path: Path) -> None:
    run = create_run(tmp_path, "run")
    (run.samples / "mine.png").touch()
    for step in (0, 10, 20, 25):
        write(run, step, 10, 4)
    assert steps_of(run) == [0, 10, 20, 25]
    for step in range(30, 100, 10):
        write(run, step, 10, 4)
    assert (run.samples / "mine.png").exists()
    assert steps_of(run) == [0, 40, 80, 90]


def test_nothing_is_removed_behind_a_link_for_the_folder(tmp_path: Path) -> None:
    run, elsewhere = create_run(tmp_path, "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    run.samples.rmdir()
    run.samples.symlink_to(elsewhere)
    for step in range(0, 100, 10):
        write(run, step, 10, 4)
    assert len(steps_of(run)) == 10
