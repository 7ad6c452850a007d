"""Another program called `mpt` is named, and this one is not taken for it."""

import sys
from pathlib import Path

import pytest

from mpt.doctor.machine.shadows import find_shadows


@pytest.fixture
def own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python with its script, first in PATH."""
    scripts = tmp_path / "own"
    write_command(scripts / "mpt")
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", str(scripts))
    return scripts


def write_command(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_the_own_command_is_no_shadow(own_command: Path) -> None:
    assert list(find_shadows()) == []


def test_another_command_first_in_the_path_is_named(
    own_command: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_command(tmp_path / "other" / "mpt")
    monkeypatch.setenv("PATH", f"{tmp_path / 'other'}:{own_command}")
    ((text, advice),) = find_shadows()
    assert text.startswith(
        f"the command mpt on the PATH is {tmp_path / 'other' / 'mpt'}, which does not belong"
    )
    assert "python -m mpt" in advice


def test_the_other_distribution_of_that_name_is_named(
    own_command: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "site" / "mpt-3.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mpt\nVersion: 3.1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    ((text, advice),) = find_shadows()
    assert text.startswith("the distribution mpt 3.1 is installed too")
    assert advice.startswith("pip uninstall mpt, ")
