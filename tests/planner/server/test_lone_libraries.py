"""Libraries that a plan imports without the further ones that they look for."""

from __future__ import annotations

import importlib
from importlib import metadata
from pathlib import Path

import pytest

from mpt.planner.server import lone_libraries


def test_a_library_finds_no_hidden_package_while_it_is_imported_and_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sought.py").write_text("")
    for name in ("seeker", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            "import importlib.util\nFOUND = importlib.util.find_spec('sought') is not None\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(lone_libraries, "LOOKING", ("seeker",))
    monkeypatch.setattr(lone_libraries, "HIDDEN", ("sought", "json"))
    with lone_libraries.lone_libraries():
        assert not importlib.import_module("seeker").FOUND
        assert importlib.import_module("other").FOUND
        importlib.import_module("sought")  # by whatever needs it afterwards
    importlib.import_module("json")  # it was imported before


def test_installed_files_are_not_searched_for_packages_while_a_library_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asker").mkdir()
    (tmp_path / "asker" / "__init__.py").write_text(
        "from importlib import metadata\nOWNERS = metadata.packages_distributions()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(lone_libraries, "LOOKING", ("asker",))
    original = metadata.packages_distributions
    with lone_libraries.lone_libraries():
        assert importlib.import_module("asker").OWNERS == {}
    assert metadata.packages_distributions is original
