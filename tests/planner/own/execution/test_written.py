"""Files that a script writes while it is planned: apart, but for those of caches."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from mpt.planner.own.execution.written import Written

pytestmark = pytest.mark.tier("fast")


def test_a_folder_lists_its_own_files_and_those_written_to_it(tmp_path: Path) -> None:
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "0.txt").touch()
    written = Written(str(tmp_path))
    with written.elsewhere():
        (tmp_path / "labels" / "0.txt").write_text("new", encoding="utf-8")
        (tmp_path / "labels" / "all.cache").write_text("new", encoding="utf-8")
        (tmp_path / "runs").mkdir()
        assert sorted(os.listdir(tmp_path)) == ["labels", "runs"]
        both = ["0.txt", "all.cache"]
        assert sorted(os.listdir(tmp_path / "labels")) == both
        assert sorted(os.listdir(os.fsencode(tmp_path / "labels"))) == [*map(os.fsencode, both)]
        assert sorted(one.name for one in (tmp_path / "labels").iterdir()) == both
        assert sorted(map(os.path.basename, glob.glob(f"{tmp_path}/labels/*"))) == both
        assert [sorted(files) for _, _, files in os.walk(tmp_path / "labels")] == [both]
        with os.scandir(tmp_path / "runs") as entries:
            assert next(entries, None) is None
    written.drop()
    assert [one.name for one in tmp_path.rglob("*")] == ["labels", "0.txt"]


@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME"])
def test_downloads_stay_in_their_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, str(tmp_path / "cache"))
    written = Written(str(tmp_path))
    with written.elsewhere():
        (tmp_path / "cache" / "hub").mkdir(parents=True)
        (tmp_path / "cache" / "hub" / "weights.pth").touch()
        handle = os.open(tmp_path / "cache" / "hub" / "lock", os.O_RDWR | os.O_CREAT)
        os.close(handle)
        (tmp_path / "cached.txt").touch()
    written.drop()
    kept = sorted(one.name for one in tmp_path.rglob("*") if one.is_file())
    assert kept == ["lock", "weights.pth"]


@pytest.mark.parametrize("is_kept_apart", [False, True])
def test_a_folder_is_removed_with_its_files(tmp_path: Path, is_kept_apart: bool) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "0.txt").touch()
    written = Written(str(tmp_path))
    with written.elsewhere():
        place = str(tmp_path / "new") if is_kept_apart else tempfile.mkdtemp()
        os.makedirs(os.path.join(place, "deeper"))
        Path(place, "deeper", "file").write_text("new", encoding="utf-8")
        shutil.rmtree(place)
        assert not os.path.exists(place)
        shutil.rmtree(tmp_path / "own")
        folder = os.open(tmp_path / "own", os.O_RDONLY)
        os.unlink("0.txt", dir_fd=folder)
        os.close(folder)
    written.drop()
    assert [one.name for one in tmp_path.rglob("*")] == ["own", "0.txt"]
