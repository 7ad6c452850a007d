"""Files are whole or absent, and no planted link is followed."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpt.errors import InputOutputError
from mpt.run.process import files
from mpt.run.process.files import write_atomically

pytestmark = pytest.mark.tier("fast")


def test_text_with_the_name_of_a_file_that_is_no_utf_8_is_written(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.md", "run b\udcff")
    assert (tmp_path / "a.md").read_text("utf-8") == "run b\\udcff"


def test_a_link_planted_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "samples").symlink_to(elsewhere)
    with pytest.raises(InputOutputError, match="symbolic link"):
        write_atomically(tmp_path / "samples" / "a.png", b"x", follow_folder=False)
    assert list(elsewhere.iterdir()) == []


def test_a_link_planted_in_place_of_the_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("whole")
    (tmp_path / "a").symlink_to(tmp_path / "victim")
    write_atomically(tmp_path / "a", b"x", follow_folder=False)
    assert (tmp_path / "victim").read_text() == "whole"
    assert (tmp_path / "a").read_bytes() == b"x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "victim"]


def test_no_file_takes_the_place_of_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "null").write_text("a device")
    monkeypatch.setattr(files, "DEVICES", tmp_path)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "null", Path("null")):
        with pytest.raises(InputOutputError, match=r"null: a device, .*; name a file$"):
            write_atomically(path, "{}")
    assert (tmp_path / "null").read_text() == "a device"
    (tmp_path / "shm").mkdir()
    write_atomically(tmp_path / "shm" / "plan.lock", "{}")


def test_a_file_system_without_inodes_is_not_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was "disk is full: 100636 needed, 9138176 free"."""
    space = {"f_bavail": 1000, "f_frsize": 4096, "f_bfree": 1000, "f_blocks": 2000, "f_favail": 0}
    full, named = (
        OSError(errno.ENOSPC, "No space left on device"),
        r"no room for one more file \(inodes\)",
    )
    monkeypatch.setattr(files.os, "statvfs", lambda folder: SimpleNamespace(**space, f_files=100))
    with pytest.raises(InputOutputError, match=named), files.failures_explained(tmp_path / "x", 10):
        raise full
    # as btrfs tells
    monkeypatch.setattr(files.os, "statvfs", lambda folder: SimpleNamespace(**space, f_files=0))
    with (
        pytest.raises(InputOutputError, match=r"the disk is full: free some space\. 10 bytes"),
        files.failures_explained(tmp_path / "x", 10),
    ):
        raise full
