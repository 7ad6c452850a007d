"""A returned model replaces another at once: whatever is killed or fails, the folder is the old one or the new one."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpt.errors import InputOutputError
from mpt.run.process import operating_system
from mpt.systems.deepfacelab.commands.shared import model_switch
from mpt.systems.deepfacelab.commands.shared.model_folder import Folder, write_file
from mpt.systems.deepfacelab.commands.shared.model_switch import replacing
from scripts.faults.fault_battery_power import (
    PowerRecorder,
    lay_out,
    read_state,
    watch_operations,
    write_states,
)

ROOT = Path(__file__).parents[5]
PARTS = ("encoder", "decoder_src", "decoder_dst")
EVENTS = (
    "open",
    "os.link",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.scandir",
    "os.listdir",
    "os.chmod",
)
"""What Python reports of operations on files before it does them."""


def content(folder):
    """Every file of a folder and below by its name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def make_old(place):
    """A folder with a model, its backups, a model of another name and notes."""
    model = place / "model"
    for name, text in (
        ("foo_SAEHD_data.dat", "old"),
        *((f"foo_SAEHD_{part}.npy", f"old {part}") for part in (*PARTS, "inter_B")),
        ("bar_SAEHD_encoder.npy", "bar"),
        ("bar_SAEHD_autobackups/01/bar_SAEHD_encoder.npy", "bar before"),
        ("foo_SAEHD_autobackups/01/foo_SAEHD_encoder.npy", "older"),
        ("foo_SAEHD_autobackups/24/foo_SAEHD_encoder.npy", "oldest"),
        ("foo_SAEHD_notes.txt", "mine"),
    ):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(text)
    return model


def write_new(model):
    with replacing(Folder(model, "foo_SAEHD_")) as folder:
        for number, part in enumerate(PARTS):
            write_file(folder.file(part), {"x": np.full(100, number, np.float32)})


def assert_is_new(model, before):
    found = content(model)
    old_model = {
        name: data for name, data in before.items() if data.startswith(b"old") and "/" not in name
    }
    assert {name for name in found if "/" not in name} == {
        f"foo_SAEHD_{part}.npy" for part in PARTS
    } | {
        "bar_SAEHD_encoder.npy",
        "foo_SAEHD_notes.txt",
    }
    assert all(found[f"foo_SAEHD_{part}.npy"].startswith(b"\x80\x04") for part in PARTS)
    assert {
        f"foo_SAEHD_autobackups/01/{name}": data for name, data in old_model.items()
    }.items() <= found.items()
    assert found["foo_SAEHD_autobackups/02/foo_SAEHD_encoder.npy"] == b"older"
    assert b"oldest" not in found.values()
    assert found["bar_SAEHD_autobackups/01/bar_SAEHD_encoder.npy"] == b"bar before"


def test_a_model_is_replaced_whole_and_becomes_its_newest_backup(tmp_path):
    model = make_old(tmp_path)
    before = content(model)
    write_new(model)
    assert_is_new(model, before)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def killed_at(number, model):
    """Replace the model in a child that is killed before its operation of this number; tell whether it was."""
    child = os.fork()
    if child == 0:
        count = 0

        def die(event, arguments):
            nonlocal count
            if event in EVENTS:
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die)
        write_new(model)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_kill_at_any_file_operation_leaves_the_old_or_the_new_model_whole(tmp_path, can_exchange):
    """In a process of its own, whose forks copy less memory than those of all tests' process would."""
    code = f"from {__name__} import kill_everywhere; kill_everywhere({str(tmp_path)!r}, {can_exchange})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=280)


def kill_everywhere(folder, can_exchange):
    """Kill a replacement at each of its operations; assert that what is left is the old or the new model."""
    tmp_path = Path(folder)
    os.fsync = lambda _: None  # a kill leaves the system's memory of files; this is faster
    if not can_exchange:
        model_switch.exchange = lambda *_: False
    number, seen = 0, set()
    while True:
        number += 1
        place = tmp_path / str(number)
        model = make_old(place)
        before = content(model)
        if not killed_at(number, model):
            break
        if can_exchange:
            assert model.is_dir()  # DeepFaceLab finds one or the other at once
        else:
            with model_switch.held(model):
                model_switch.recover(model)
        is_old = content(model) == before
        if not is_old:
            assert_is_new(model, before)
        seen.add(is_old)
        write_new(model)  # what is left does not hinder the next return, which removes it
        assert [path.name for path in place.iterdir()] == ["model"]
    assert seen == {True, False}
    assert number > 40


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_power_loss_at_any_moment_leaves_the_old_or_the_new_model_whole(
    tmp_path, monkeypatch, can_exchange
):
    if not can_exchange:
        monkeypatch.setattr(model_switch, "exchange", lambda *_: False)
    place = tmp_path / "place"
    before = content(make_old(place))
    child = os.fork()
    if child == 0:
        recorder = PowerRecorder(place)
        recorder.start()
        watch_operations(recorder.look, recorder.note_sync)
        write_new(place / "model")
        write_states(recorder.states(), tmp_path)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    count = len(json.loads((tmp_path / "states.json").read_text()))
    seen = []
    for number in range(count):
        model = tmp_path / str(number) / "model"
        lay_out(read_state(tmp_path, number), model.parent)
        with model_switch.held(model):
            model_switch.recover(model)
        seen.append(content(model) == before)
        if not seen[-1]:
            assert_is_new(model, before)
    assert seen[0]
    assert not seen[-1]  # the return had ended
    assert count > 40


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["mkdir", "open", "write", "fsync", "rename"])
def test_a_failure_of_any_call_leaves_the_old_model(tmp_path, monkeypatch, call, number):
    model = make_old(tmp_path)
    before = content(model)
    monkeypatch.setattr(model_switch, "exchange", lambda *_: False)

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    if call == "write":
        monkeypatch.setattr(
            "mpt.systems.deepfacelab.commands.shared.model_folder.write_arrays", fail
        )
    else:
        monkeypatch.setattr(os, call, fail)
    with pytest.raises(InputOutputError):
        write_new(model)
    monkeypatch.undo()
    assert content(model) == before
    write_new(model)
    assert_is_new(model, before)


def test_a_second_rename_that_fails_puts_the_old_model_back(tmp_path, monkeypatch):
    model = make_old(tmp_path)
    before = content(model)
    monkeypatch.setattr(model_switch, "exchange", lambda *_: False)
    real = os.rename

    def second_fails(old, new):
        if os.path.basename(old) == "new":
            raise OSError(errno.EIO, "broken")
        real(old, new)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(InputOutputError):
        write_new(model)
    assert content(model) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_file_systems_without_second_names_get_copies(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    model = make_old(tmp_path)
    before = content(model)
    write_new(model)
    assert_is_new(model, before)


def test_what_another_program_saves_meanwhile_is_not_lost(tmp_path):
    model = make_old(tmp_path)
    with replacing(Folder(model, "foo_SAEHD_")) as folder:
        write_file(folder.file("encoder"), {"x": np.zeros(3, np.float32)})
        (model / "bar_SAEHD_new").write_text("bar saved anew")
        os.replace(model / "bar_SAEHD_new", model / "bar_SAEHD_encoder.npy")
        (model / "foo_SAEHD_encoder.npy").write_text("old, trained further")
        (model / "late.txt").write_text("late")
    found = content(model)
    assert found["bar_SAEHD_encoder.npy"] == b"bar saved anew"
    assert found["late.txt"] == b"late"
    assert found["foo_SAEHD_encoder.npy"].startswith(b"\x80")
    assert found["foo_SAEHD_autobackups/01/foo_SAEHD_encoder.npy"] == b"old, trained further"


def test_a_link_to_a_folder_is_followed_and_a_model_that_is_a_link_is_kept(tmp_path):
    model = make_old(tmp_path)
    (tmp_path / "elsewhere.npy").write_text("linked")
    (model / "foo_SAEHD_encoder.npy").unlink()
    (model / "foo_SAEHD_encoder.npy").symlink_to("../elsewhere.npy")
    (tmp_path / "link").symlink_to(model)
    write_new(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (model / "foo_SAEHD_autobackups/01/foo_SAEHD_encoder.npy").read_text() == "linked"
    assert (tmp_path / "elsewhere.npy").read_text() == "linked"


def test_two_returns_to_one_folder_do_not_mix(tmp_path):
    with (
        replacing(Folder(tmp_path / "model", "foo_SAEHD_")),
        pytest.raises(InputOutputError, match="another process"),
    ):
        write_new(tmp_path / "model")


def test_a_mount_point_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(InputOutputError, match="inside of it"):
        write_new(make_old(tmp_path))


def test_two_folders_change_names_in_one_step_or_not_at_all(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    swapped = operating_system.exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "other").exists() == swapped
    assert (tmp_path / "other" / "one").exists() == swapped
    if swapped:
        with pytest.raises(OSError, match="No such file"):
            operating_system.exchange(tmp_path / "one", tmp_path / "nowhere")
