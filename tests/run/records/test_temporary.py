"""Temporary folders of killed processes go at the next start; those in use, young ones and strangers' stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mpt.run.records.temporary import temporary_folder

pytestmark = pytest.mark.tier("fast")

HELD = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
from mpt.run.records.temporary import temporary_folder
with temporary_folder("mpt-rank-") as folder:
    print(folder, flush=True)
    sys.stdin.readline()
"""


def age(folder: Path) -> None:
    os.utime(folder, (1e9, 1e9))


def test_a_killed_process_s_folder_goes_and_one_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", HELD, str(tmp_path)]
    holders = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = [
        Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout is not None
    ]
    for folder in folders:
        age(folder)
    holders[0].send_signal(signal.SIGKILL)
    holders[0].communicate(timeout=20)
    with temporary_folder("mpt-rank-") as own:
        assert [folder.exists() for folder in folders] == [False, True]
    holders[1].communicate("\n", timeout=20)
    assert not own.exists()
    assert not folders[1].exists()


def test_young_folders_and_what_others_named_alike_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    young, old, link, other = (
        tmp_path / f"mpt-rank-{name}" for name in ("young", "old", "link", "other")
    )
    for folder in (young, old, other):
        folder.mkdir()
    (other / "lock").touch()
    link.symlink_to(other)
    age(old)
    with temporary_folder("mpt-rank-"):
        assert sorted(path.name for path in (young, old, link, other) if path.exists()) == [
            "mpt-rank-link",
            "mpt-rank-other",
            "mpt-rank-young",
        ]
