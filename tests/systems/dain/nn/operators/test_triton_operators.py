"""Triton reads TRITON_INTERPRET when it is imported, so its operators are tested in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1].joinpath("triton_cases.py")


def test_the_triton_operators_compute_what_torchs_do():
    pytest.importorskip("triton", reason="the interpreter of Triton is not installed")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(CASES),
    ]
    # Without coverage: the interpreter runs the kernels' lines for every program, and each would be counted.
    environment = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
