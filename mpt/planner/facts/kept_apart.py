"""Folders among the temporary files that a planning process needs for a plan of a script.

The process removes them after the plan. One that is ended amid a plan cannot, since it is killed: a script may never
come back. So the names hold the process's number, and who ends it removes what it left. Imports the standard library
alone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

OWNER = "MPT_PLANNING_PROCESS"
"""Has the number of a planning process in it and in its forks."""


def own_folders() -> None:
    """Let the folders of this process and of its forks have its number from now on."""
    os.environ[OWNER] = str(os.getpid())


def prefix(process: int | str = "") -> str:
    """Return the first characters of the names of a process's folders, by default of this one's."""
    return f"mpt-plan-{process or os.environ.get(OWNER, os.getpid())}-"


def remove_folders(process: int) -> None:
    """Remove what a process that has ended, and its forks, left; what cannot be removed stays."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix(process)}*"):
        shutil.rmtree(folder, ignore_errors=True)
