"""`mpt train` in a process of its own, as a comparison starts it: signals are passed on, last words brought back.

The process reads a pipe whose other end is held here. When that ends without a word, as after `kill -9`, the run is
told to stop: it saves, and neither the card nor the run's folder stays taken.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mpt.run.signals import StopRequest
from mpt.workflows.warm_process import WarmProcess, stop_at_end_of_input

Train = Callable[[Path, Path, str, bool], tuple[int, str]]
"""Train a config file below a folder under a name, resuming or not: exit code and last words."""
Check = Callable[[Path], tuple[int, str]]
"""Build what a config file describes and train nothing: exit code and last words."""


def train_in_process(allow: Sequence[str], warm: WarmProcess | None = None) -> Train:
    """Return a function that trains in a process of its own, a fork of `warm` where that can be."""

    def train(file: Path, folder: Path, name: str, resumes: bool) -> tuple[int, str]:
        options = ["--runs", str(folder), "--name", name, "--no-report"]
        return run_train(file, [*options, *(["--resume", str(folder / name)] if resumes else [])], allow, warm)

    return train


def check_in_process(allow: Sequence[str], warm: WarmProcess | None = None) -> Check:
    """Return a function that makes a dry run in a process of its own, a fork of `warm` where that can be."""
    return lambda file: run_train(file, ["--dry-run"], allow, warm)


def run_train(
    file: Path, options: Sequence[str], allow: Sequence[str], warm: WarmProcess | None = None
) -> tuple[int, str]:
    """Run `mpt train`; return its exit code, 128 and the signal's number if one arrived here, and its last words."""
    arguments = ["train", str(file), "--quiet", *options]
    arguments += [word for package in allow for word in ("--allow", package)]
    if warm is not None and warm.begin():
        return run_fork(warm, arguments)
    command = [sys.executable, "-m", __name__, *arguments]
    with StopRequest() as stop, held_pipe() as held:
        # A session of its own: Ctrl-C then reaches this process alone, which passes it on once.
        process = subprocess.Popen(
            command, stdin=held, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        passed_on = False
        while True:
            try:
                _, words = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                if stop.requested and not passed_on:
                    passed_on = True
                    process.send_signal(signal.SIGTERM)
        if stop.signal_number is not None:
            return 128 + stop.signal_number, ""
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return code, last_words(words)


def run_fork(warm: WarmProcess, arguments: Sequence[str]) -> tuple[int, str]:
    """Do the same in a fork of a process that has imported everything."""
    told: list[int] = []
    with StopRequest() as stop:

        def pass_on(process: int) -> None:
            if stop.requested and not told:
                told.append(process)
                os.kill(process, signal.SIGTERM)

        code, words = warm.run(arguments, pass_on)
        if stop.signal_number is not None:
            return 128 + stop.signal_number, ""
    return code if code >= 0 else 128 - code, last_words(words)


@contextlib.contextmanager
def held_pipe() -> Iterator[int]:
    """Give the reading end of a pipe that ends when the block, or this process, does."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(writing)
        os.close(reading)


def main() -> None:
    """Run `mpt` with this process's arguments, and stop it once standard input has ended."""
    stop_at_end_of_input()
    runpy.run_module("mpt", run_name="__main__", alter_sys=True)


def last_words(text: str) -> str:
    """Return a failed process's error, or whatever it said at its end, in one line."""
    lines = text.strip().splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    said = lines[errors[-1] :] if errors else lines[-4:]
    return " ".join(" ".join(said).split()).removeprefix("error: ")


if __name__ == "__main__":
    main()
