"""Forks of this planning process, which have its imports and all that it has learnt from its plans.

Torch refuses a backward in a fork if autograd has started its threads for devices. They are started by the first
backward, as many as there are devices: it is made before the fake device is registered. No plan needs such
a thread, since `set_multithreading_enabled(False)` keeps each backward in the thread that calls it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import IO

TASKS = "/proc/self/task"
"""Has a folder for each thread of this process."""


def fork(control: int) -> tuple[int, tuple[IO[str], IO[str]] | None]:
    """Fork this process, with pipes that `control` delivers; return the fork's number, 0 if it has threads.

    In the fork, return also its requests and the file for its answers. Other threads would be missing in a fork, and
    locks that they hold be held for ever.
    """
    with socket.socket(fileno=os.dup(control)) as delivery:
        _, (requests, answers, errors), _, _ = socket.recv_fds(delivery, 1, 3)
    pid = os.fork() if len(os.listdir(TASKS)) == 1 else -1
    if pid == 0:
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.close(control)
        found = (
            os.fdopen(os.dup(requests), encoding="utf-8"),
            os.fdopen(os.dup(answers), "w", encoding="utf-8"),
        )
    for one in (requests, answers, errors):
        os.close(one)
    return (0, found) if pid == 0 else (max(0, pid), None)


def leave() -> None:
    """End this process when its forks have ended, so that their processor time counts as its own."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)
