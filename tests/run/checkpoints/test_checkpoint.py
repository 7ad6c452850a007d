"""Checkpoints: whole or absent, whatever is killed, flipped, cut, filled up or planted."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.errors import CheckpointError, InputOutputError
from mpt.run.checkpoints import checkpoint as checkpoint_module
from mpt.run.checkpoints.checkpoint import load, read_checkpoint, save
from mpt.run.checkpoints.retention import clean_temporaries, find_best, list_steps, set_aside_after
from mpt.run.process.signals import StopRequest
from mpt.run.records.layout import RunDirectory, create_run, open_run

pytestmark = pytest.mark.tier("fast")


FILES = ("state.safetensors", "state.json", "manifest.json")


def state_at(step: int, count: int = 3000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    weights = torch.randn(count, generator=generator)
    return {
        "model": {"weight": weights},
        "optimizer": {0: {"step": torch.tensor(float(step))}},
        "samples": step * 64,
    }


def assert_whole(state: dict[str, Any], step: int, count: int = 3000) -> None:
    assert state["samples"] == step * 64
    assert torch.equal(state["model"]["weight"], state_at(step, count)["model"]["weight"])


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tmp_path, "demo")


def temporaries(run: RunDirectory) -> list[str]:
    return [
        path.name
        for path in (*run.path.iterdir(), *run.checkpoints.iterdir())
        if path.name.startswith(".")
    ]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_newest_checkpoint_of_a_run_comes_back(run) -> None:
    for step in (100, 200):
        path = save(run, step, state_at(step), keep_last=3, extra_manifest={"config": "abc"})
    found = load(run)
    assert (found.step, found.path, found.notes) == (200, path, [])
    assert path.name == "step-00000200"
    assert found.manifest["extra"] == {"config": "abc"}
    assert_whole(found.state, 200)
    assert load(run.path).step == 200
    assert load(run.checkpoint_path(100)).step == 100
    assert temporaries(run) == []


def test_the_last_few_and_the_best_are_kept(run) -> None:
    for step, metric in enumerate([0.1, 0.9, None, 0.9, float("nan"), 0.5, None, 0.3]):
        save(run, step, {"n": step}, keep_last=2, metric=metric)
    assert list_steps(run) == [1, 6, 7]
    best = find_best(run)
    assert best is not None
    assert (best.step, best.metric) == (1, 0.9)


def test_a_metric_that_should_fall_keeps_its_lowest(run) -> None:
    for step, metric in enumerate([30.0, 12.5, 14.0, 20.0]):
        save(run, step, {}, keep_last=1, metric=metric, higher_is_better=False)
    assert list_steps(run) == [1, 3]


def test_a_step_saved_again_replaces_the_earlier_one(run) -> None:
    save(run, 5, {"value": "old"}, keep_last=1)
    save(run, 5, {"value": "new"}, keep_last=1)
    assert load(run).state == {"value": "new"}
    assert temporaries(run) == []


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(run, monkeypatch) -> None:
    save(run, 5, {"value": "old"}, keep_last=1)
    real, calls = os.rename, []

    def killed_at_the_second(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*arguments, **options)

    monkeypatch.setattr(os, "rename", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        save(run, 5, {"value": "new"}, keep_last=1)
    monkeypatch.undo()
    assert list_steps(run) == []
    assert any("the earlier one is back" in note for note in clean_temporaries(run))
    assert load(run).state == {"value": "old"}


def test_resuming_earlier_sets_the_other_future_aside(run) -> None:
    for step in (1, 2, 3):
        save(run, step, {"n": step}, keep_last=5)
    notes = set_aside_after(run, 1)
    assert len(notes) == 2
    assert (load(run).step, load(run).notes) == (1, [])
    assert (run.checkpoints / "abandoned-step-00000003").is_dir()


def test_what_was_set_aside_goes_when_the_run_has_come_as_far_or_sets_others_aside(run) -> None:
    def abandoned() -> list[str]:
        return sorted(path.name for path in run.checkpoints.glob("abandoned-*"))

    for step in (1, 2, 3):
        save(run, step, {"n": step}, keep_last=5)
    set_aside_after(run, 1)
    save(run, 2, {"n": -2}, keep_last=5)
    assert abandoned() == ["abandoned-step-00000003"]
    set_aside_after(run, 2)
    assert abandoned() == ["abandoned-step-00000003"]  # nothing new was set aside
    set_aside_after(run, 1)
    assert abandoned() == ["abandoned-step-00000002"]
    assert read_checkpoint(run.checkpoints / "abandoned-step-00000002").state == {"n": -2}
    save(run, 4, {"n": 4}, keep_last=5)
    assert abandoned() == []


def damage(path: Path, kind: str, generator: random.Random) -> str:
    """Injure one checkpoint and return what was done."""
    name = generator.choice(FILES)
    file = path / name
    size = file.stat().st_size
    if kind == "flip":
        content = bytearray(file.read_bytes())
        bit = generator.randrange(8 * size)
        content[bit // 8] ^= 1 << (bit % 8)
        file.write_bytes(content)
        return f"{name} bit {bit}"
    if kind == "hole":
        content = bytearray(file.read_bytes())
        start = generator.randrange(size)
        content[start : start + 4096] = bytes(len(content[start : start + 4096]))
        file.write_bytes(content)
    elif kind == "cut":
        os.truncate(file, generator.randrange(size))
    elif kind == "empty":
        os.truncate(file, 0)
    elif kind == "longer":
        file.write_bytes(file.read_bytes() + b"\0")
    elif kind == "missing":
        file.unlink()
    else:
        shutil.rmtree(path)
    return name


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("flip", 60),
        ("hole", 15),
        ("cut", 15),
        ("empty", 6),
        ("longer", 6),
        ("missing", 6),
        ("gone", 1),
    ],
)
def test_a_damaged_newest_checkpoint_is_refused_and_the_one_before_is_used(
    run, kind: str, times: int
) -> None:
    save(run, 100, state_at(100), keep_last=2)
    whole = run.path / "whole"
    newest = save(run, 200, state_at(200), keep_last=2, metric=0.5)
    shutil.copytree(newest, whole)
    generator = random.Random(kind)
    for _ in range(times):
        done = damage(newest, kind, generator)
        found = load(run)
        assert found.step == 100, done
        assert_whole(found.state, 100)
        assert "step-00000200" in found.notes[0]
        assert "step-00000100 is used instead" in found.notes[-1]
        with pytest.raises(CheckpointError):
            load(newest)
        shutil.rmtree(newest, ignore_errors=True)
        shutil.copytree(whole, newest)
        assert load(run).step == 200


def test_when_every_checkpoint_is_bad_the_run_is_refused(run) -> None:
    for step in (1, 2, 3):
        path = save(run, step, state_at(step), keep_last=3)
        os.truncate(path / "state.safetensors", 100)
    with pytest.raises(
        CheckpointError, match=r"step-00000003.*step-00000002.*step-00000001"
    ) as caught:
        load(run)
    assert caught.value.exit_code == 4


def test_a_run_without_checkpoints_and_a_path_that_is_none_are_refused(run, tmp_path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"x")
    for source in (run, run.path, run.checkpoint_path(9), tmp_path / "weights.pt", tmp_path):
        with pytest.raises(CheckpointError):
            load(source)


def test_a_checkpoint_under_another_steps_name_is_refused(run) -> None:
    path = save(run, 1, state_at(1), keep_last=1)
    os.rename(path, run.checkpoint_path(2))
    with pytest.raises(CheckpointError, match="of step 1"):
        load(run)


def test_links_pipes_and_devices_in_a_checkpoint_are_not_opened(run, tmp_path) -> None:
    save(run, 1, state_at(1), keep_last=3)
    for step, name in ((2, "state.json"), (3, "state.safetensors"), (4, "manifest.json")):
        path = save(run, step, state_at(step), keep_last=5)
        os.rename(path / name, tmp_path / name)
        if step == 2:
            os.mkfifo(path / name)
        else:
            (path / name).symlink_to(tmp_path / name)
    run.checkpoint_path(5).symlink_to(run.checkpoint_path(1))
    found = load(run)
    assert found.step == 1
    assert len(found.notes) == 5


def test_pickles_beside_a_checkpoint_are_never_read(run) -> None:
    path = save(run, 1, state_at(1), keep_last=1)
    for name in ("state.pt", "optimizer.pkl", "data.pkl"):
        (path / name).write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    assert_whole(load(run).state, 1)


def test_a_full_disk_is_explained_and_the_last_good_checkpoint_stays(run) -> None:
    save(run, 1, state_at(1, 30_000), keep_last=1)
    with (
        file_size_limit(50_000),
        pytest.raises(InputOutputError, match=r"\d{6} bytes are needed, \d+ are free") as caught,
    ):
        save(run, 2, state_at(2, 30_000), keep_last=1)
    assert caught.value.exit_code == 5
    assert "step-00000002" in str(caught.value)
    assert temporaries(run) == []
    assert_whole(load(run).state, 1, 30_000)


@pytest.mark.parametrize(
    ("kept", "said"), [(1, "free some space."), (2, "free some space or lower train.keep_last.")]
)
def test_fewer_checkpoints_are_a_remedy_of_a_full_disk_if_several_are_kept(
    run, monkeypatch, kept: int, said: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(InputOutputError) as caught:
        save(run, 1, state_at(1), keep_last=kept)
    assert f"the disk is full: {said}" in str(caught.value)


@pytest.mark.tier("full")
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename", "write"])
def test_a_failure_of_any_call_leaves_the_last_good_checkpoint(
    run, monkeypatch, call: str, number: int
) -> None:
    save(run, 1, state_at(1), keep_last=1)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(InputOutputError) as caught:
        save(run, 2, state_at(2), keep_last=1)
    # space matters to a full disk alone
    assert ("bytes are needed" in str(caught.value)) == (number == errno.ENOSPC)
    monkeypatch.undo()
    assert_whole(load(run).state, 1)
    assert temporaries(run) == []


def test_what_a_killed_save_left_is_cleaned_at_the_next_start_and_invisible_until_then(run) -> None:
    save(run, 1, state_at(1), keep_last=1)
    left = run.checkpoints / ".tmp-0123456789abcdef"
    shutil.copytree(run.checkpoint_path(1), left)
    (run.path / ".tmp-fedcba9876543210").write_text("half a config")
    run.samples.mkdir(exist_ok=True)
    (run.samples / ".tmp-00112233aabbccdd").write_text("half a picture")
    assert load(run).step == 1
    assert len(clean_temporaries(run)) == 3
    assert temporaries(run) == []
    assert clean_temporaries(run) == []
    assert list(run.samples.iterdir()) == []


def test_nothing_is_cleaned_behind_a_link_in_the_place_of_samples(run, tmp_path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".tmp-0123456789abcdef").write_text("of another program")
    run.samples.rmdir()
    run.samples.symlink_to(elsewhere)
    assert clean_temporaries(run) == []
    assert len(list(elsewhere.iterdir())) == 1


def test_a_link_planted_where_checkpoints_go_is_not_followed(run, tmp_path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run.checkpoint_path(1).symlink_to(elsewhere)
    save(run, 1, state_at(1), keep_last=1)
    assert_whole(load(run).state, 1)
    (run.checkpoints / "index.json").unlink()
    (run.checkpoints / "index.json").symlink_to(elsewhere / "index.json")
    (run.checkpoints / ".tmp-link").symlink_to(elsewhere)
    (elsewhere / "precious").write_text("x")
    save(run, 2, state_at(2), keep_last=1)
    clean_temporaries(run)
    shutil.rmtree(run.checkpoints)
    run.checkpoints.symlink_to(elsewhere)
    with pytest.raises(InputOutputError, match="symbolic link"):
        save(run, 3, state_at(3), keep_last=1)
    assert [path.name for path in elsewhere.iterdir()] == ["precious"]


def test_a_signal_during_a_save_waits_for_its_end(run, monkeypatch) -> None:
    real = checkpoint_module.write_files

    def interrupted(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        real(*arguments)

    monkeypatch.setattr(checkpoint_module, "write_files", interrupted)
    with StopRequest() as stop:
        save(run, 1, state_at(1), keep_last=1)
        assert stop.signal_number == signal.SIGTERM
    assert_whole(load(run).state, 1)


SAVER = """
import os, sys
from pathlib import Path
import torch
from mpt.run.checkpoints.checkpoint import load, save
from mpt.run.records.layout import open_run
from mpt.run.checkpoints.retention import clean_temporaries
sys.path.insert(0, sys.argv[2])
from test_checkpoint import state_at
torch.set_num_threads(1)
run = open_run(Path(sys.argv[1]))
for line in sys.stdin:
    first = int(line)
    child = os.fork()
    if child == 0:
        with run.hold():
            clean_temporaries(run)
            for step in range(first, first + 10**6):
                save(run, step, state_at(step), keep_last=2, metric=-step)
                os.write(1, f"saved {step}\\n".encode())
    os.write(1, f"child {child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


def kill_while_saving(run: RunDirectory, times: int) -> None:
    save(run, 0, state_at(0), keep_last=2, metric=0.0)
    generator = random.Random(times)
    command = [sys.executable, "-c", SAVER, str(run.path), str(Path(__file__).parent)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    step = 0
    try:
        for _ in range(times):
            server.stdin.write(f"{step + 1}\n")
            server.stdin.flush()
            saved, child = step, 0
            while not child or saved == step:  # until it saves at full speed
                kind, number = server.stdout.readline().split()
                child, saved = (int(number), saved) if kind == "child" else (child, int(number))
            time.sleep(generator.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            while (words := server.stdout.readline().split()) != ["dead"]:
                saved = int(words[1])
            found = load(run)  # as a reader would, before anything is cleaned
            # Killed between the rename and its message, the save after the last reported one is there as well.
            assert found.step in (saved, saved + 1)
            assert found.notes == []
            assert_whole(found.state, found.step)
            with run.hold() as note:
                assert note is not None
                clean_temporaries(run)
            assert temporaries(run) == []
            assert 0 in list_steps(run)  # the best
            step = found.step
    finally:
        server.kill()
        server.wait()
        server.stdin.close()
        server.stdout.close()


@pytest.mark.tier("full")
def test_a_kill_at_any_moment_of_saving_loses_nothing_that_was_saved(run) -> None:
    kill_while_saving(run, 12)


@pytest.mark.slow
def test_hundreds_of_kills_at_any_moment_lose_nothing(run) -> None:
    kill_while_saving(run, 300)


@pytest.mark.slow
def test_thousands_of_flipped_bits_are_all_noticed(run) -> None:
    save(run, 100, state_at(100, 200), keep_last=2)
    newest = save(run, 200, state_at(200, 200), keep_last=2, metric=0.5)
    whole = {name: (newest / name).read_bytes() for name in FILES}
    generator = random.Random(0)
    for _ in range(5000):
        done = damage(newest, "flip", generator)
        assert load(run).step == 100, done
        for name, content in whole.items():
            (newest / name).write_bytes(content)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_disk_is_explained(tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=False
    ).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        run = create_run(disk, "demo")
        save(run, 1, state_at(1, 400_000), keep_last=2)
        with pytest.raises(InputOutputError, match="the disk is full"):
            save(run, 2, state_at(2, 400_000), keep_last=2)
        assert_whole(load(open_run(run.path)).state, 1, 400_000)
        assert temporaries(run) == []
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(InputOutputError, match="read-only"):
            save(run, 3, {}, keep_last=2)
        assert load(run).step == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)
