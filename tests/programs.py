"""Commands of mpt and modules of the tests that run in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_mpt(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of mpt in a process of its own, however it ends. `options` are those of `subprocess.run`."""
    command = [sys.executable, "-m", "mpt", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, **{"check": False, "timeout": 200, **options}
    )


def run_program(module: str, *words: str) -> list[str]:
    """Run a module on one thread and return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def rows_of(module: str, *words: str) -> list[dict[str, Any]]:
    """Run a module and return the rows that it prints, each behind `ROW`."""
    lines = run_program(module, *words)
    return [json.loads(line.removeprefix("ROW ")) for line in lines if line.startswith("ROW ")]
