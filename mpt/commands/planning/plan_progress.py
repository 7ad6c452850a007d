"""How far a search is, on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console


@contextlib.contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """Show on the terminal, while a search runs, how many recipes are planned and how many of them fit."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda planned, fitting: None
        return
    with console.status("planning") as status:
        yield lambda planned, fitting: status.update(
            f"searching: {planned} recipe{'s' * (planned != 1)} planned, {fitting} fit"
        )
