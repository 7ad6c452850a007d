"""Processes that the GPU check starts, and which end when it does; and whether what they need is installed.

A check that is killed must leave nothing behind that goes on measuring beside its second run. Linux sends a signal to
a process whose parent is gone; elsewhere a process ends when its work is done.
"""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
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


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return in one line why a process failed: its last error, not the hints that torch writes behind it."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed|Interrupt)\b", line)]
    return [f"exit {done.returncode}", *lines[-1:], *errors[-1:]][-1].strip()


def refuse_without_packages() -> None:
    """End with exit code 2 and one line where something that mpt needs is not installed: a bare machine lacks some."""
    missing = [f"'{need}'" for need in needs() if not is_installed(need)]
    if missing:
        where = 'docs/gpu.md, "A machine without a network"'
        print(f"error: not installed here: {' '.join(missing)}; install them with pip, or see {where}", file=sys.stderr)
        sys.exit(2)


def needs() -> list[str]:
    """Return what mpt needs, as pip takes it: "pydantic>=2.9,<3"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return [str(need) for need in project["dependencies"]]


def is_installed(need: str) -> bool:
    """Is any version of a package there?"""
    found = re.match(r"[\w.-]+", need)
    try:
        return found is not None and bool(version(found.group()))
    except PackageNotFoundError:
        return False
