"""Forks of a planning process: further workers that need no imports, and know what their original has planned.

A search's workers cost the imports of torch and of a model's library each, and every operator's first call. A fork has
all that. It is made by the worker itself (`mpt.planner.server.twins`), which is given the ends of new pipes over a
socket; on Linux only. Elsewhere, and if the worker refuses, workers are processes of their own.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from typing import IO, Any

CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")


class Fork:
    """A fork, with the members of `subprocess.Popen` that a worker's owner uses."""

    def __init__(self, handle: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.handle, self.stdin, self.stdout = handle, stdin, stdout

    def poll(self) -> int | None:
        """Return a number if it has ended."""
        waiting = select.poll()
        waiting.register(self.handle, select.POLLIN)
        return 0 if waiting.poll(0) else None

    def kill(self) -> None:
        """End it. By its handle: its number may belong to another process already."""
        if sys.platform == "linux" and self.poll() is None:
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until it has ended, and release the handle."""
        if self.handle >= 0:
            waiting = select.poll()
            waiting.register(self.handle, select.POLLIN)
            waiting.poll()
            os.close(self.handle)
            self.handle = -1


def control_sockets() -> tuple[socket.socket, socket.socket] | None:
    """Return both ends of the socket over which a worker gets its forks' pipes; None where nothing is forked."""
    return socket.socketpair() if CAN_FORK else None


def request_fork(ask: Any, control: socket.socket, errors: IO[str]) -> Fork | None:
    """Have a worker fork itself; None if it does not. `ask` sends it a request and returns the answer."""
    their_stdin, stdin = os.pipe()
    stdout, their_stdout = os.pipe()
    given = [their_stdin, their_stdout, errors.fileno()]
    own = os.fdopen(stdin, "w", encoding="utf-8"), os.fdopen(stdout, "r", encoding="utf-8")
    try:
        socket.send_fds(control, [b"f"], given)
        answer = ask({"fork": True})
        if sys.platform == "linux" and answer is not None and answer["pid"]:
            return Fork(os.pidfd_open(answer["pid"]), *own)
    except OSError:  # it ended, or there are no descriptors left
        pass
    finally:
        os.close(their_stdin)
        os.close(their_stdout)
    for pipe in own:
        pipe.close()
    return None
