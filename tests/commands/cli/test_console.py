"""How wide tables are."""

import sys

import pytest

from mpt.commands.cli.console import open_console

pytestmark = pytest.mark.tier("fast")


def test_tables_in_a_file_are_wider_than_the_80_columns_of_an_unknown_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert open_console().width == 120
    monkeypatch.setenv("COLUMNS", "70")
    assert open_console().width == 70
