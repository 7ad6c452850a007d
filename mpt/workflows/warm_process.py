"""A process that has imported everything and trains nothing itself: each training of a comparison is a fork of it.

Two thirds of a short run were imports. The process runs no operation of torch, so a fork finds torch as a new process
does: no threads, no generator used, no mode entered. Where torch is built for a GPU every run is a process that imports
for itself, since a device's runtime does not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO, Any, NoReturn, Self

READY, STARTED, ENDED = "ready", "started", "ended"


class WarmProcess:
    """The process, from the first run on to the end of the block."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.is_fit = hasattr(os, "fork")
        self.held = (-1, -1)
        """A pipe whose writing end nobody else has: runs read it, and stop when it ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            os.close(self.held[1])
            os.close(self.held[0])
            self.process.wait()
            self.process = None

    def begin(self) -> bool:
        """Start the process unless it is there. Returns False where runs have to be processes of their own."""
        if self.process is None and self.is_fit:
            self.held = os.pipe()
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self.held[0])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[self.held[0]],
                bufsize=0,  # a line that was read ahead would not be seen by `select`
                start_new_session=True,
            )
            if self.answer() != READY:
                self.__exit__(None, None, None)
                self.is_fit = False
        return self.process is not None

    def answer(self) -> str:
        """Return what the process says next; nothing once it has ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def run(self, words: Sequence[str], while_waiting: Callable[[int], None]) -> tuple[int, str]:
        """Run `mpt WORDS` in a fork; return its exit code as `Popen.returncode` and what it wrote to standard error.

        `while_waiting` is called with its process id five times a second.
        """
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as errors:
            request = json.dumps({"words": list(words), "errors": errors.name}) + "\n"
            self.process.stdin.write(request.encode())
            _, _, number = self.answer().partition(" ")
            if not number:
                return 1, "the process that starts runs has ended"
            while not select.select([self.process.stdout], [], [], 0.2)[0]:
                while_waiting(int(number))
            _, _, code = self.answer().partition(" ")
            return int(code or 1), errors.read()


def stop_at_end_of_input() -> None:
    """Tell this process to stop once standard input has ended."""

    def watch() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def serve(held: int, requests: IO[str]) -> None:
    """Import everything, then fork for each request."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if not import_everything():
        return
    tell(answers, READY)
    for line in iter(requests.readline, ""):
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            answers.close()
            become(request, held, requests)
        try:
            tell(answers, f"{STARTED} {child}")
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            tell(answers, f"{ENDED} {code}")
        except BrokenPipeError:  # who asked has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), answers.fileno())  # or it would be written at exit
            return


def tell(answers: IO[str], line: str) -> None:
    """Write one line of an answer."""
    answers.write(f"{line}\n")
    answers.flush()


def import_everything() -> bool:
    """Import what a training imports. Returns False where torch is built for a device that a fork would break."""
    gc.disable()
    import torch

    if torch.version.cuda or torch.version.hip or torch.backends.mps.is_built():
        return False
    import mpt.engine.assembly
    import mpt.engine.loop
    import mpt.engine.resume
    import mpt.engine.without_compiler
    import mpt.planner.beside
    import mpt.workflows.train  # noqa: F401

    gc.freeze()
    gc.enable()
    return True


def become(request: dict[str, Any], held: int, requests: IO[str]) -> NoReturn:
    """Be the run that was asked for, with the streams of a process of its own."""
    code = 1
    try:
        errors = os.open(request["errors"], os.O_WRONLY | os.O_APPEND)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        requests.close()
        for source, target in ((held, 0), (nowhere, 1), (errors, 2)):
            os.dup2(source, target)
        stop_at_end_of_input()
        sys.argv[1:] = request["words"]
        runpy.run_module("mpt", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    # Not sys.stdin's own reading ahead: a fork must not hold a part of the next request.
    serve(int(sys.argv[1]), os.fdopen(os.dup(0), "r", buffering=1, encoding="utf-8"))
    os._exit(0)  # with what was frozen, taking everything apart would take long and find fault with torch
