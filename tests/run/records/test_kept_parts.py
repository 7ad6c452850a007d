"""Copies of parts in a run's folder count only if every recorded file is there as it was."""

import hashlib
import json
from pathlib import Path

import pytest

from mpt.run.records.kept_parts import kept_packages, lost_parts
from mpt.run.records.layout import RunDirectory

pytestmark = pytest.mark.tier("fast")
FILES = {"nn/net.py": "net = 1\n", "losses/own.py": "loss = 1\n"}


def run_with_parts(folder: Path) -> RunDirectory:
    """A run that used two packages of two files each, which are no longer where they were."""
    hashes = {file: hashlib.sha256(text.encode()).hexdigest() for file, text in FILES.items()}
    packages = [
        {"name": name, "folder": "gone", "distribution": None, "files": hashes}
        for name in ("one", "two")
    ]
    for name in ("one", "two"):
        for file, text in FILES.items():
            path = folder / "parts" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (folder / "parts.json").write_text(json.dumps(packages))
    return RunDirectory(folder)


def test_a_package_counts_as_kept_with_all_its_files_only(tmp_path: Path) -> None:
    run = run_with_parts(tmp_path)
    assert kept_packages(run) == {name: tmp_path / "parts" / name for name in ("one", "two")}
    assert lost_parts(run) == []
    (tmp_path / "parts" / "two" / "nn" / "net.py").write_text("net = 2\n")
    assert list(kept_packages(run)) == ["one"]
    assert lost_parts(run) == ["two/nn/net.py", "two/losses/own.py"]


def test_a_file_that_could_not_be_read_when_it_was_recorded_is_not_kept(tmp_path: Path) -> None:
    run = run_with_parts(tmp_path)
    recorded = json.loads((tmp_path / "parts.json").read_text())
    recorded[0]["files"]["nn/net.py"] = None
    (tmp_path / "parts.json").write_text(json.dumps(recorded))
    (tmp_path / "parts" / "one" / "nn" / "net.py").unlink()
    assert list(kept_packages(run)) == ["two"]
