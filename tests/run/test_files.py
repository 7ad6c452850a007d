"""Files are whole or absent, and no planted link is followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpt.errors import InputOutputError
from mpt.run.files import write_atomically


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
