"""Processes that the GPU check starts, and which end when it does.

A check that is killed must leave nothing behind that goes on measuring beside its second run. Linux sends a signal to
a process whose parent is gone; elsewhere a process ends when its work is done.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
"""Of Linux' prctl: the signal to get when the parent ends."""
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def run(
    command: list[Any], timeout: float, cwd: Path | None = None, said: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with `said` on its standard input. Raises subprocess.TimeoutExpired."""
    end = end_with_parent if LIBC else None
    return subprocess.run(
        command, input=said, capture_output=True, text=True, timeout=timeout, check=False, cwd=cwd, preexec_fn=end
    )


def end_with_parent() -> None:
    """Ask to be killed when the process that started this one ends."""
    assert LIBC is not None
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
