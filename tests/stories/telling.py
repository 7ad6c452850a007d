"""What a story needs: to run `mpt` as its reader would, to see what it answers, and tiny pictures.

A story is a script for an empty folder, `python first_generator.py`; it runs the `mpt` that its Python has installed.
Two variables change how: MPT_STORY_COMMAND is put in place of `python -m mpt`, as in
MPT_STORY_COMMAND="python tests/run/without_posix.py" for a system like Windows, and MPT_STORY_TOGETHER=1 runs all
commands but those that are interrupted in the story's own process, which imports torch once.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TOGETHER = os.environ.get("MPT_STORY_TOGETHER") == "1"
COMMAND = shlex.split(os.environ.get("MPT_STORY_COMMAND", "")) or [
    sys.executable,
    "-P",
    "-m",
    "mpt",
]
LONGEST_WAIT = 300.0
"""Seconds that a command may take on a machine with much else to do."""


def mpt(words: str, *says: str, code: int = 0) -> str:
    """Run `mpt WORDS`, see that it ends with `code`, without a traceback, and says all of `says`; return its output."""
    found, said = run_here(words) if TOGETHER else run_apart(words)
    assert found == code, f"mpt {words}: ended with {found}, not {code}\n{said}"
    assert "Traceback" not in said, f"mpt {words}\n{said}"
    for wanted in says:
        assert wanted in said, f"mpt {words}: does not say {wanted!r}\n{said}"
    return said


def refused(words: str, *says: str, code: int) -> None:
    """Run `mpt WORDS`, see that it ends with `code` and answers in one line, which says all of `says`."""
    said = mpt(words, *says, code=code)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, f"mpt {words}\n{said}"
    assert said.rstrip().endswith(errors[0]), f"mpt {words}: more follows the error\n{said}"


def run_apart(words: str) -> tuple[int, str]:
    """Run a command in a process of its own."""
    done = subprocess.run(
        [*COMMAND, *shlex.split(words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=LONGEST_WAIT,
    )
    return done.returncode, done.stdout


def run_here(words: str) -> tuple[int, str]:
    """Run a command in this process."""
    from mpt.cli import main

    said, before = io.StringIO(), dict(os.environ)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(shlex.split(words))
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
        finally:  # where `--parts` is kept for the processes that a command starts
            os.environ.clear()
            os.environ.update(before)
    raise AssertionError("main returned")


def start(words: str) -> subprocess.Popen[str]:
    """Start `mpt WORDS` and leave it running."""
    return subprocess.Popen(
        [*COMMAND, *shlex.split(words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )


def write(path: str, text: str) -> None:
    """Write a text file, with its folders."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, "utf-8")


def pictures(
    folder: str, classes: Mapping[str, tuple[int, int, int]], count: int, width: int = 40
) -> None:
    """Write `count` noisy pictures of a colour into a folder for each class: folder/class/0.png and so on."""
    import numpy
    from PIL import Image

    random = numpy.random.default_rng(0)
    for name, colour in classes.items():
        (Path(folder) / name).mkdir(parents=True)
        for number in range(count):
            pixels = numpy.clip(
                random.normal(colour, 25, (width * 3 // 4, width, 3)), 0, 255
            ).astype("uint8")
            Image.fromarray(pixels).save(Path(folder) / name / f"{number}.png")


def size_of(path: str) -> tuple[int, int]:
    """Return a picture's width and height."""
    from PIL import Image

    with Image.open(path) as picture:
        return picture.size
