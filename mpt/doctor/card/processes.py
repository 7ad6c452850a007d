"""Processes of a check that end when it does: a check that is killed leaves nothing that measures alongside its next
run.

Linux sends a signal to a process whose parent is gone; elsewhere a process ends when its work is done.
"""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Of Linux' prctl: the signal to get when the parent ends."""
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def run(
    command: Sequence[str | Path],
    timeout: float,
    cwd: Path | None = None,
    said: str = "",
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with `said` on its standard input. Raises subprocess.TimeoutExpired."""
    end = end_with_parent if LIBC else None
    return subprocess.run(
        command,
        input=said,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
        cwd=cwd,
        env=env,
        preexec_fn=end,
    )


def end_with_parent() -> None:
    """Ask to be killed when the process that started this one ends."""
    assert LIBC is not None
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return in one line why a process failed: its last error, not the hints that torch writes behind it."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if re.match(r"[\w.]*(Error|Exception|Failed|Interrupt)\b|error:", line)
    ]
    return [f"exit {done.returncode}", *lines[-1:], *errors[-1:]][-1].strip()
