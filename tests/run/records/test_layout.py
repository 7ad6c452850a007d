"""Run directories: one name, one place, one writer."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mpt.errors import CheckpointError, ConfigError, InputOutputError, Interrupted
from mpt.run.checkpoints.checkpoint import load
from mpt.run.records import lock
from mpt.run.records.layout import create_run, find_run, list_runs, newest_run, open_run

pytestmark = pytest.mark.tier("fast")


def hold_in_another_process(path: Path, then: str = "") -> subprocess.Popen[str]:
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom mpt.run.records.layout import open_run\n"
        f"with open_run(Path(sys.argv[1])).hold():\n    child = 0\n    {then or 'pass'}\n"
        "    if child or not sys.argv[2:]: print(child, flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    return process


def finish(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_equal_names_get_numbers(tmp_path) -> None:
    assert [create_run(tmp_path, "demo").name for _ in range(3)] == ["demo", "demo-2", "demo-3"]


def test_runs_created_at_once_never_share_a_directory(tmp_path) -> None:
    with ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(lambda _: create_run(tmp_path, "demo"), range(64)))
    assert len({run.path for run in runs}) == 64


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/x",
        "a/b",
        "a\0b",
        "x" * 300,
        "",
        ".",
        "..",
        ".hidden",
        "a\nb",
        "<img onerror>",
        "a ",
        " ä",
    ],
)
def test_a_name_that_is_more_than_one_directory_is_refused_and_nothing_is_written(
    tmp_path, name: str
) -> None:
    runs = tmp_path / "inside" / "runs"
    with pytest.raises(ConfigError) as caught:
        create_run(runs, name)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_link_planted_at_the_run_path_is_not_followed(tmp_path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(elsewhere)
    (tmp_path / "runs" / "demo-2").symlink_to(tmp_path / "dangling")
    assert create_run(tmp_path / "runs", "demo").name == "demo-3"
    assert list(elsewhere.iterdir()) == []
    assert not (tmp_path / "dangling").exists()


def test_a_link_in_place_of_the_lock_or_the_checkpoints_is_refused(tmp_path) -> None:
    run = create_run(tmp_path, "demo")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run.lock_path.symlink_to(victim)
    with pytest.raises(InputOutputError, match="symbolic link"), run.hold():
        pass
    assert victim.read_text() == "precious"
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="symbolic link"):
        open_run(run.path)


def test_a_directory_for_runs_that_cannot_be_made_is_explained(tmp_path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(InputOutputError, match="runs could not be written"):
        create_run(tmp_path / "runs", "demo")


def test_a_file_in_place_of_the_directory_for_runs_is_explained(tmp_path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(InputOutputError, match="a file stands where a directory is wanted"):
        create_run(tmp_path / "runs", "demo")


def test_a_second_writer_is_refused_by_name_and_the_first_goes_on(tmp_path) -> None:
    run = create_run(tmp_path, "demo")
    with run.hold():
        with (
            pytest.raises(InputOutputError, match=f"process {os.getpid()} on") as caught,
            open_run(run.path).hold(),
        ):
            pass
        assert caught.value.exit_code == 5
        with pytest.raises(InputOutputError), open_run(run.path).hold():
            pass
    with run.hold() as note:
        assert note is None


def test_the_lock_of_a_killed_writer_is_taken_over(tmp_path) -> None:
    run = create_run(tmp_path, "demo")
    process = hold_in_another_process(run.path)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(InputOutputError, match=f"process {process.pid}"), run.hold():
        pass
    finish(process)
    with run.hold() as note:
        assert note is not None
        assert f"process {process.pid}" in note


def test_a_run_that_was_stopped_or_explained_its_end_was_not_killed(tmp_path) -> None:
    run = create_run(tmp_path, "demo")
    with pytest.raises(Interrupted), run.hold():
        raise Interrupted("saved", 2)
    with run.hold() as note:
        assert note is None


def test_a_full_disk_at_the_lock_is_explained(tmp_path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = create_run(tmp_path, "demo")
    monkeypatch.setattr(lock, "write_holder", fail)
    with pytest.raises(InputOutputError, match="the disk is full"), run.hold():
        pass


def test_a_data_worker_that_outlives_a_killed_run_does_not_keep_it_locked(tmp_path) -> None:
    run = create_run(tmp_path, "demo")
    process = hold_in_another_process(
        run.path, "child = os.fork() or sys.argv.append('child') or 0"
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        os.kill(worker, 0)  # it lives
        deadline = time.monotonic() + 10
        while True:
            try:
                with run.hold() as note:
                    assert note is not None
                break
            except (
                InputOutputError
            ):  # on a busy machine the fork may not have run yet, and so not let go
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        os.kill(worker, signal.SIGKILL)
        finish(process)


def test_a_lock_is_given_back_when_the_run_fails(tmp_path) -> None:
    run = create_run(tmp_path, "demo")
    with pytest.raises(ZeroDivisionError), run.hold():
        _ = 1 / 0
    with run.hold():
        pass


def test_the_newest_run_is_the_one_written_to_last(tmp_path) -> None:
    runs = [create_run(tmp_path, name) for name in ("b", "a", "c")]
    for age, run in zip((100, 0, 50), runs, strict=True):
        run.metrics_path.write_text("")
        for path in (run.path, run.metrics_path):
            os.utime(path, (2_000_000_000 - age, 2_000_000_000 - age))
    assert newest_run(tmp_path).name == "a"
    assert [run.name for run in list_runs(tmp_path)] == ["b", "c", "a"]


def test_a_report_or_pictures_of_an_old_run_do_not_make_it_the_newest(tmp_path) -> None:
    old, new = create_run(tmp_path, "demo"), create_run(tmp_path, "demo")
    for seconds, run in ((1, old), (2, new)):
        run.config_path.write_text("")
        os.utime(run.config_path, (seconds, seconds))
    (old.path / "inference").mkdir()
    assert newest_run(tmp_path).name == new.name


def test_no_run_at_all_is_said_with_the_remedy(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="mpt train"):
        newest_run(tmp_path / "runs")


def test_a_run_is_found_by_name_path_and_checkpoint(tmp_path, monkeypatch) -> None:
    run = create_run(tmp_path / "runs", "demo")
    checkpoint = run.checkpoint_path(100)
    checkpoint.mkdir()
    monkeypatch.chdir(tmp_path)
    runs = Path("runs")
    assert find_run("demo", runs) == (run, None)
    assert find_run("runs/demo", runs) == (run, None)
    assert find_run(str(run.path), runs) == (run, None)
    assert find_run("runs/demo/checkpoints/step-00000100/", runs) == (run, checkpoint)
    assert find_run("demo/checkpoints/step-00000100", runs) == (run, checkpoint)


@pytest.mark.parametrize(
    "text", ["dmo", "", "a\0b", "../..", "x" * 5000, "demo/checkpoints/step-00000999"]
)
def test_what_is_no_run_is_refused(tmp_path, text: str) -> None:
    create_run(tmp_path, "demo")
    with pytest.raises(CheckpointError) as caught:
        find_run(text, tmp_path)
    assert caught.value.exit_code == 4
    if text == "dmo":
        assert "Did you mean demo?" in str(caught.value)


def test_a_weights_file_is_told_from_a_run_and_its_use_is_said(tmp_path) -> None:
    exported = create_run(tmp_path, "demo").path / "demo.safetensors"
    exported.touch()
    with pytest.raises(
        CheckpointError, match=r"is a file, not a run or checkpoint.*model\.weights="
    ):
        find_run(str(exported), tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"is a file, not a run or checkpoint: name a run\.$"):
        find_run("notes.txt", tmp_path)


def test_where_many_runs_are_there_it_is_said_that_only_the_newest_are_named(tmp_path) -> None:
    for index in range(7):
        create_run(tmp_path, f"demo-{index}")
    with pytest.raises(CheckpointError, match=r"The newest of 7 runs: (demo-\d, ){4}demo-\d\.$"):
        find_run("nothing", tmp_path)


def test_a_folder_of_runs_such_as_a_comparison_is_told_from_a_run(tmp_path) -> None:
    create_run(tmp_path / "compare-x", "fp32-seed-0")
    with pytest.raises(
        CheckpointError, match=r"compare-x is no run but holds runs: .*compare-x/fp32-seed-0\."
    ):
        find_run("compare-x", tmp_path)


def test_a_run_is_found_although_a_folder_of_its_name_holds_runs(tmp_path, monkeypatch) -> None:
    create_run(tmp_path / "demo", "inner")
    run = create_run(tmp_path / "demo", "demo")
    monkeypatch.chdir(tmp_path)
    assert find_run("demo", Path("demo")) == (run, None)


def test_a_checkpoint_that_is_gone_is_told_from_those_that_are_there(tmp_path) -> None:
    run = create_run(tmp_path, "demo")
    run.checkpoint_path(200).mkdir()
    with pytest.raises(
        CheckpointError, match=r"holds no step-00000100; it has step-00000200 \(train\.keep_last"
    ):
        find_run("demo/checkpoints/step-00000100", tmp_path)


def test_an_empty_directory_that_a_kill_left_is_taken_by_the_next_start(
    tmp_path, monkeypatch
) -> None:
    real, made = Path.mkdir, []

    def killed_at_the_second(self: Path, *arguments: Any, **options: Any) -> None:
        if self.parent != tmp_path.parent:
            made.append(self)
        if len(made) == 2:  # the run's directory, its checkpoints
            raise KeyboardInterrupt
        real(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        create_run(tmp_path, "demo")
    monkeypatch.undo()
    assert os.listdir(tmp_path / "demo") == []
    assert create_run(tmp_path, "demo").name == "demo"
    assert create_run(tmp_path, "demo").name == "demo-2"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_stands_for_the_checkpoints_is_named(tmp_path, kind: str) -> None:
    run = create_run(tmp_path, "demo")
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to(tmp_path) if kind == "link" else run.checkpoints.write_text("x")
    with pytest.raises(CheckpointError, match=f"checkpoints is a .*{kind}"):
        load(run)
    run.checkpoints.unlink()
    with pytest.raises(CheckpointError, match="no checkpoints directory any more"):
        load(run)


def test_a_run_from_the_future_is_not_the_newest_for_ever(tmp_path) -> None:
    ahead, now = create_run(tmp_path, "ahead"), create_run(tmp_path, "now")
    for run in (ahead, now):
        run.config_path.write_text("x")
    later = time.time() + 10 * 365 * 86400
    os.utime(ahead.config_path, (later, later))
    assert newest_run(tmp_path).name == "now"
    assert [run.name for run in list_runs(tmp_path)] == ["ahead", "now"]


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.EIO])
def test_a_lock_that_cannot_be_emptied_at_the_end_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    run = create_run(tmp_path, "demo")
    truncate = os.ftruncate

    def refuse(descriptor: int, length: int) -> None:
        if length == 0:
            raise OSError(error, os.strerror(error))
        truncate(descriptor, length)

    with run.hold():
        monkeypatch.setattr(os, "ftruncate", refuse)
    monkeypatch.undo()
    with run.hold():
        pass
