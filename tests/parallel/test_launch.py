"""The launcher of several processes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_launch_leaves_nothing_among_the_temporary_files(tmp_path: Path) -> None:
    """torch's launcher makes a folder for its processes' output there, and never removes it."""
    code = "from mpt.parallel.launch import launch\nraise SystemExit(launch(['-h'], 1, 0))\n"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=100, check=False)
    # torchinductor_USER is the cache of torch's compiler
    left = [name for name in os.listdir(tmp_path) if not name.startswith("torchinductor_")]
    assert (done.returncode, left) == (0, [])
