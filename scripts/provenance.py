"""When a table was made and from which commit: every script that writes into docs/benchmarks says it by `made`.

tests/test_benchmark_pages.py refuses a table whose section has no date, commit, machine and command.
"""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def made() -> str:
    """Return `2026-11-25, commit 1a2b3c4d`; a commit ends in `+changes` if tracked files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+changes"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return f"{datetime.date.today()}, commit {run.stdout.strip() or 'unknown'}"
