"""A run records the parts from outside that it used, and says when they are missing or other ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mpt.config.finding.part_packages import use_parts
from mpt.config.finding.registry import INSTALLED
from mpt.errors import ConfigError, PartError
from mpt.run.records.used_parts import (
    changed_parts,
    missing_parts_explained,
    read_used_parts,
    write_used_parts,
)

pytestmark = pytest.mark.tier("fast")


TRICK = '''"""A trick that does nothing."""
from mpt.config.options import Options
class Settings(Options):
    pass
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MPT_PARTS", "")
    # of another test's folder
    for name in [name for name in sys.modules if name.startswith("mpt.parts.")]:
        monkeypatch.delitem(sys.modules, name)
    parts = tmp_path / "tricks of mine"
    (parts / "memory").mkdir(parents=True)
    for name in ("used", "unused"):
        (parts / "memory" / f"{name}.py").write_text(TRICK)
    return parts


@pytest.fixture
def record(tmp_path: Path, folder: Path) -> Path:
    use_parts([folder])
    plugin = INSTALLED.find("memory", "used")
    assert plugin
    plugin.load()
    write_used_parts(tmp_path / "parts.json")
    return tmp_path / "parts.json"


def test_what_was_imported_is_recorded_with_its_hash(record: Path, folder: Path) -> None:
    (one,) = read_used_parts(record)
    assert one["name"] == "tricks_of_mine"
    assert one["folder"] == str(folder)
    assert list(one["files"]) == ["memory/used.py"]
    assert changed_parts(record) == []


def test_a_run_without_parts_from_outside_has_no_record(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "parts.json"
    path.write_text("[]")
    write_used_parts(path)
    assert not path.exists()
    assert changed_parts(path) == []


def test_a_change_and_an_absence_are_named(
    record: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "memory" / "unused.py").unlink()
    assert changed_parts(record) == []
    (folder / "memory" / "used.py").write_text(TRICK + "\n")
    assert changed_parts(record) == ["tricks_of_mine/memory/used.py"]
    (folder / "memory" / "used.py").unlink()
    assert changed_parts(record) == ["tricks_of_mine/memory/used.py"]
    monkeypatch.setenv("MPT_PARTS", "")
    assert changed_parts(record) == ["tricks_of_mine/memory/used.py"]


def test_a_folder_that_moved_is_the_same_package(
    record: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = folder.parent / "elsewhere" / folder.name
    moved.parent.mkdir()
    folder.rename(moved)
    monkeypatch.setenv("MPT_PARTS", str(moved))
    assert changed_parts(record) == []


def test_a_configuration_that_needs_absent_parts_says_which_to_add(
    record: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(ConfigError, match=r"^no such trick$"),
        missing_parts_explained(record.parent),
    ):
        raise ConfigError("no such trick")  # all parts are here: the mistake is another one
    monkeypatch.setenv("MPT_PARTS", "")
    said = r"not here: tricks_of_mine \(memory/used.py\); add --parts .*tricks of mine"
    with pytest.raises(PartError, match=said), missing_parts_explained(record.parent):
        raise ConfigError("no such trick")


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '[{"name": 1, "files": {}}]', "[" * 100_000, "null"]
)
def test_a_damaged_record_is_none(record: Path, text: str) -> None:
    record.write_text(text)
    assert read_used_parts(record) == []
    assert json.dumps(changed_parts(record)) == "[]"
