"""First weeks of strangers, as scripts that run `mpt` in an empty folder: `python tests/stories/NAME.py`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STORIES = sorted(
    path.stem for path in (ROOT / "tests" / "stories").glob("*.py") if path.stem != "telling"
)
NEEDS = {"fine_tuning": ["timm"], "onnx_elsewhere": ["onnx", "onnxscript", "onnxruntime"]}


def tell(name: str, folder: Path, *program: str, **variables: str) -> None:
    """Run a story in a folder, with the mpt of this tree; by another program where one is named."""
    missing = [package for package in NEEDS.get(name, ()) if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    done = subprocess.run(
        [sys.executable, *program, str(ROOT / "tests" / "stories" / f"{name}.py")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=280,
    )
    assert done.returncode == 0, done.stdout


def test_there_are_nine_stories() -> None:
    assert len(STORIES) == 9


def test_what_a_newcomer_mistypes_is_answered_in_one_line(tmp_path: Path) -> None:
    tell("mistakes", tmp_path, MPT_STORY_TOGETHER="1")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STORIES if name != "mistakes"])
def test_a_strangers_first_week(name: str, tmp_path: Path) -> None:
    tell(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", STORIES)
def test_a_strangers_first_week_without_posix(name: str, tmp_path: Path) -> None:
    program = str(ROOT / "tests" / "run" / "without_posix.py")
    command = shlex.join([sys.executable, "-P", program])
    tell(
        name,
        tmp_path,
        program,
        MPT_STORY_TOGETHER="1",
        MPT_STORY_COMMAND=command,
        PYTHONIOENCODING="cp1252",
    )
