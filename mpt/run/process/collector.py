"""Python's garbage collector at a command's start.

Imports make a million objects that stay, and collecting among them takes a quarter of the time until the first step.
A command line switches it off first; a training freezes the objects that exist at its first step and then collects as
usual; other commands collect rarely. A program that imports `mpt` is left alone.
"""

from __future__ import annotations

import gc

RARELY = (100_000, 20, 100)
"""Thresholds of `gc.set_threshold`; Python's own are 700, 10, 10."""
usual: list[tuple[int, int, int]] = []
"""The thresholds before `pause`; empty if nothing was changed."""


def pause() -> None:
    """Collect nothing until another function of this module says so."""
    if gc.isenabled() and not usual:
        usual.append(gc.get_threshold())
        gc.disable()


def collect_rarely() -> None:
    """End a pause for a command that still imports."""
    if usual:
        gc.set_threshold(*RARELY)
        gc.enable()


def collect_as_usual() -> None:
    """End a pause; present objects are not looked at again until the command ends."""
    if usual:
        gc.freeze()
        gc.set_threshold(*usual[0])
        gc.enable()


def end() -> None:
    """Leave the collector as it was before `pause`."""
    if usual:
        # else extension modules report objects that are left at the interpreter's end as leaks
        gc.unfreeze()
        gc.set_threshold(*usual.pop())
        gc.enable()
