"""`mpt train` in a process of its own, as a comparison starts it: signals are passed on, last words brought back.

The process reads a pipe whose other end is held here. When that ends, on purpose or without a word, as after `kill -9`,
the run has to stop: it saves, and neither the card nor the run's folder stays taken. On Windows a signal would
end it at once.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpt.run.process.signals import signal_main_thread
from mpt.workflows.processes.turns import HostMemory, Stop, peak_bytes

Train = Callable[[Path, Path, str, bool], tuple[int, str]]
"""Train a config file below a folder under a name, resuming or not: exit code and last words."""
Check = Callable[[Path], tuple[int, str]]
"""Build the run of a config file and train nothing: exit code and last words."""


@dataclass(frozen=True)
class Surroundings:
    """Working folder and environment of a process of `mpt train`."""

    allow: Sequence[str] = ()
    """The packages that a model may come from."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of this process."""
    stop: Stop | None = None
    """Who says when it is to end; by default it ends with a signal to this process."""
    memory: HostMemory | None = None
    """Receives the memory that it took."""


def train_in_process(surroundings: Surroundings) -> Train:
    """Return a function that trains in a process of its own."""

    def train(file: Path, folder: Path, name: str, resumes: bool) -> tuple[int, str]:
        options = ["--runs", str(folder), "--name", name, "--no-report"]
        return run_train(
            file, [*options, *(["--resume", str(folder / name)] if resumes else [])], surroundings
        )

    return train


def check_in_process(surroundings: Surroundings) -> Check:
    """Return a function that makes a dry run in a process of its own."""
    return lambda file: run_train(file, ["--dry-run"], surroundings)


def run_train(file: Path, options: Sequence[str], surroundings: Surroundings) -> tuple[int, str]:
    """Run `mpt train`; return its exit code, 128 and the signal's number if one arrived here, and its last words.

    A process that has to end saves, and is waited for.
    """
    arguments = ["train", str(file), "--quiet", *options]
    arguments += [word for package in surroundings.allow for word in ("--allow", package)]
    stop = surroundings.stop or Stop()
    told, used = False, 0

    def look(process: int, end: Callable[[], None]) -> None:
        nonlocal told, used
        used = max(used, peak_bytes(process))
        if stop.requested and not told:
            told = True
            end()

    with contextlib.nullcontext() if surroundings.stop else stop.request:
        code, words = run_alone(arguments, look, surroundings.environment)
    if surroundings.memory is not None and code == 0:
        surroundings.memory.see(used)
    if stop.signal_number is not None:
        return 128 + stop.signal_number, ""
    return code if code >= 0 else 128 - code, last_words(words)


def run_alone(
    arguments: Sequence[str],
    while_waiting: Callable[[int, Callable[[], None]], None],
    environment: Mapping[str, str],
) -> tuple[int, str]:
    """Run `mpt ARGUMENTS` in a process; return its exit code as `Popen.returncode` and its standard error.

    `environment` is added to this process's. `while_waiting` is called five times a second with the process id and a
    function that asks the process to stop.
    """
    command = [sys.executable, "-m", __name__, *arguments]
    with held_pipe() as (held, end):
        # A session of its own: Ctrl-C then reaches this process alone, which passes it on once.
        process = subprocess.Popen(
            command,
            stdin=held,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
            env={**os.environ, **environment},
        )
        while True:
            try:
                _, words = process.communicate(timeout=0.2)
                return process.returncode, words
            except subprocess.TimeoutExpired:
                while_waiting(process.pid, end)


@contextlib.contextmanager
def held_pipe() -> Iterator[tuple[int, Callable[[], None]]]:
    """Give the reading end of a pipe, and the function that ends it; it ends when the block, or this process, does."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as held:
        try:
            yield reading, held.close
        finally:
            os.close(reading)


def stop_at_end_of_input() -> None:
    """Stop this process once standard input has ended."""

    def watch() -> None:
        os.read(0, 1)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)  # nothing is there to be saved yet
        else:
            signal_main_thread(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


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
