"""The console that commands print tables on."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_OF_FILES = 120
"""Columns of a table that goes into a file or a pipe, which have no width of their own."""


def open_console() -> Console:
    """Open standard output: as wide as the terminal or as `COLUMNS` says, and 120 columns in a file or a pipe."""
    from rich.console import Console

    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_known else WIDTH_OF_FILES, highlight=False)
