"""Processes that plan: how many, how one is started, and those that a command starts ahead of its own imports.

A planning process imports torch for seconds. `mpt plan` starts its processes before it has imported the reader of its
command line and configuration, which another core then does meanwhile (`start_ahead`). Nothing is imported here
but the standard library and a module that needs no more.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from mpt.planner.client.forks import CAN_FORK, Fork, control_sockets, request_fork
from mpt.planner.facts.kept_apart import remove_folders
from mpt.run.process.operating_system import usable_cores

MOST = 8
"""Each holds a torch of its own, some 400 MiB."""
LEAVE_SECONDS = 1.0
ON_ALL_CORES = ("--vram", "--scaling", "presets")
"""Options and sub-commands of `mpt plan` that have many recipes planned."""
WITHOUT = ("-h", "--help", "--parts", "--quick", "tune", "calibrate", "check")
"""Options and sub-commands that need no such process, or decide its arguments."""


@dataclass(frozen=True)
class Planner:
    """A process that plans (`mpt.planner.server.worker`), and the file that its standard error goes to."""

    process: subprocess.Popen[str] | Fork
    errors: IO[str]
    environment: dict[str, str]
    control: socket.socket | None = None
    """Takes the pipes of its forks; None if it does not fork."""

    def end(self, has_forks: bool = False) -> None:
        """End the process, which keeps nothing, at once: it would take a while to unload torch.

        An original whose forks and input have ended does so without, when it has waited for them: nobody else can.
        """
        if has_forks and isinstance(self.process, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(LEAVE_SECONDS)
        self.process.kill()
        self.process.wait()
        if isinstance(self.process, subprocess.Popen):
            remove_folders(self.process.pid)
        self.errors.close()
        if self.control is not None:
            self.control.close()

    def fork(self, ask: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Planner | None:
        """Have the process, which is idle, fork itself; None if it does not. `ask` sends it a request."""
        if self.control is None:
            return None
        errors = errors_file()
        process = request_fork(ask, self.control, errors)
        if process is None:
            errors.close()
            return None
        return Planner(process, errors, self.environment)


PLANNING = "MPT_PLANNING"
"""Set in the environment of planning processes, which import the main script."""

_ahead: list[Planner] = []


def count_workers() -> int:
    """Return how many processes plan a search's recipes: one per core that this process may use."""
    return max(1, min(usable_cores(), MOST))


def environment() -> dict[str, str]:
    """Return the variables of a planning process: it imports from the same places."""
    return {
        **os.environ,
        PLANNING: "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def start() -> Planner:
    """Start a process, or take one that was started ahead with the same variables."""
    variables = environment()
    while _ahead:
        found = _ahead.pop()
        if found.environment == variables and found.process.poll() is None:
            return found
        found.end()
    errors, sockets = errors_file(), control_sockets()
    theirs = [sockets[1].fileno()] if sockets else []
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "mpt.planner.server.worker", *map(str, theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            env=variables,
            pass_fds=theirs,
        )
    except OSError:
        errors.close()
        if sockets:
            sockets[0].close()
        raise
    finally:
        if sockets:
            sockets[1].close()
    return Planner(process, errors, variables, sockets[0] if sockets else None)


def errors_file() -> IO[str]:
    """Return a file for a process's standard error, to be closed by who ends it."""
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def start_ahead(words: Sequence[str]) -> None:
    """Start processes that a command line is about to need, if it plans or validates an existing configuration.

    Unused ones end with this process.
    """
    options = {word.partition("=")[0] for word in words if word.startswith("-")} | {*words[1:2]}
    if list(words[:1]) not in (["plan"], ["validate"]) or options & set(WITHOUT):
        return
    if any(
        word.startswith("@") or (word.endswith((".yaml", ".yml")) and os.path.isfile(word))
        for word in words
    ):
        atexit.register(end_unused)
        with contextlib.suppress(OSError):  # reported when the process is needed
            several = bool(options & set(ON_ALL_CORES)) and not CAN_FORK  # else the first one forks
            _ahead.extend([start() for _ in range(count_workers() if several else 1)])


def end_unused() -> None:
    """End the processes that were started ahead and not taken."""
    while _ahead:
        _ahead.pop().end()
