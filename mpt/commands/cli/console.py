"""The console that commands print tables on."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH_OF_FILES = 120
"""Columns of a table that goes into a file or a pipe, which have no width of their own."""


def open_console() -> Console:
    """Open standard output: as wide as the terminal or as `COLUMNS` says, and 120 columns in a file or a pipe.

    Texts are printed as they are: brackets are no markup, and numbers are not coloured.
    """
    from rich.console import Console

    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_known else WIDTH_OF_FILES, highlight=False, markup=False)


def columns(*titles: str, is_boxed: bool = False) -> Table:
    """Return a table, by default without lines; a title that begins with > is that of a column of numbers."""
    from rich.table import Table

    table = Table() if is_boxed else Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(
            title.removeprefix(">"), justify="right" if title.startswith(">") else "left"
        )
    return table
