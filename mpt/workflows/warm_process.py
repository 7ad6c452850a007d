"""A process that has imported everything and trains nothing itself: each training of a comparison is a fork of it.

Two thirds of a short run were imports. What a fork had to import beside them, as torchvision for random crops, is
imported before the next one. The process runs no operation of torch, so a fork finds torch as a new process
does: no threads, no generator used, no mode entered. Where torch is built for a GPU every run is a process that imports
for itself, since a device's runtime does not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, NoReturn, Self

from mpt.run.process.signals import signal_main_thread

READY, STARTED, ENDED = "ready", "started", "ended"
GONE = 1, "the process that starts runs has ended"
LOOK_SECONDS = 0.1
"""How often the process looks whether a fork has ended."""
LIBRARIES = ("mpt", "numpy", "PIL", "scipy", "sympy", "timm", "torch", "torchvision")
"""What is imported for later forks. A user's packages may do anything when they are imported: each fork does that."""
MOST_TOLD_BYTES = 60_000
"""Of the names that a fork tells; a pipe holds more."""


@dataclass
class Asked:
    """What was asked of the process, and what it has answered: the fork's process id, its exit code."""

    started: Future[int] = field(default_factory=Future)
    ended: Future[int] = field(default_factory=Future)


class WarmProcess:
    """The process, from the first run on to the end of the block. Threads may have runs of it at the same time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.is_fit = hasattr(os, "fork")
        self.held = (-1, -1)
        """A pipe whose writing end nobody else has: runs read it, and stop when it ends."""
        self.lock = threading.Lock()
        self.asked: list[Asked] = []
        """By the number of the request."""
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            os.close(self.held[1])
            os.close(self.held[0])
            self.process.wait()
            if self.reader.ident is not None:
                self.reader.join()
            self.process.stdout.close()
            self.process = None

    def begin(self) -> bool:
        """Start the process unless it is there. Returns False where runs have to be processes of their own."""
        with self.lock:
            if self.process is None and self.is_fit:
                self.held = os.pipe()
                self.process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(self.held[0])],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=[self.held[0]],
                    bufsize=0,
                    start_new_session=True,
                )
                assert self.process.stdout is not None
                if self.process.stdout.readline().decode().strip() == READY:
                    self.reader.start()
                else:
                    self.__exit__(None, None, None)
                    self.is_fit = False
            return self.process is not None

    def read(self) -> None:
        """Hand the process's answers to those who asked; runs in a thread of its own."""
        assert self.process is not None
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, b""):
            number, word, value = line.decode().split()
            asked = self.asked[int(number)]
            (asked.started if word == STARTED else asked.ended).set_result(int(value))
        with self.lock:
            self.has_ended = True
            for asked in self.asked:
                for answer in (asked.started, asked.ended):
                    if not answer.done():
                        answer.set_exception(BrokenPipeError())

    def run(
        self,
        words: Sequence[str],
        while_waiting: Callable[[int], None],
        environment: Mapping[str, str] | None = None,
        output: str = os.devnull,
    ) -> tuple[int, str]:
        """Run `mpt WORDS` in a fork; return its exit code as `Popen.returncode` and what it wrote to standard error.

        `environment` is added to this process's. `while_waiting` is called with the process id five times a second.
        Standard output goes to the file `output`.
        """
        with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as errors:
            request = {"words": list(words), "environment": dict(environment or {})}
            try:
                asked = self.ask({**request, "errors": errors.name, "output": output})
                process = asked.started.result()
                while wait([asked.ended], 0.2).not_done:
                    while_waiting(process)
                return asked.ended.result(), errors.read()
            except OSError:
                return GONE

    def ask(self, request: Mapping[str, Any]) -> Asked:
        """Send a request. Raises OSError where the process has ended."""
        assert self.process is not None
        assert self.process.stdin is not None
        with self.lock:
            if self.has_ended:
                raise BrokenPipeError
            asked = Asked()
            self.asked.append(asked)
            self.process.stdin.write(json.dumps({**request, "number": len(self.asked) - 1}).encode() + b"\n")
            return asked


def stop_at_end_of_input() -> None:
    """Tell this process to stop once standard input has ended."""

    def watch() -> None:
        os.read(0, 1)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)  # nothing is there to be saved yet
        else:
            signal_main_thread(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def serve(held: int, requests: int) -> None:
    """Import everything, then fork for each request, which are lines from a descriptor."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if not import_everything():
        return
    forks: dict[int, tuple[int, int]] = {}
    """Process id -> the request's number, and a pipe with what it imported."""
    rest, is_open = b"", True
    try:
        tell(answers, READY)
        while is_open or forks:
            if is_open and select.select([requests], [], [], LOOK_SECONDS if forks else None)[0]:
                read = os.read(requests, 1 << 16)
                is_open = bool(read)
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    reading, writing = os.pipe()
                    child = os.fork()
                    if child == 0:
                        answers.close()
                        os.close(reading)
                        become(request, held, requests, writing)
                    os.close(writing)
                    forks[child] = request["number"], reading
                    tell(answers, f"{request['number']} {STARTED} {child}")
            elif not is_open:
                time.sleep(LOOK_SECONDS)
            for child, (number, reading) in list(forks.items()):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    del forks[child]
                    tell(answers, f"{number} {ENDED} {os.waitstatus_to_exitcode(status)}")
                    os.set_blocking(reading, False)  # what the fork started may hold the other end
                    with contextlib.suppress(BlockingIOError):
                        import_too(os.read(reading, MOST_TOLD_BYTES).decode().split())
                    os.close(reading)
    except BrokenPipeError:  # who asked has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), answers.fileno())  # or it would be written at exit


def tell(answers: IO[str], line: str) -> None:
    """Write one line of an answer."""
    answers.write(f"{line}\n")
    answers.flush()


def import_everything() -> bool:
    """Import what a training imports. Returns False where torch is built for a device that a fork would break."""
    gc.disable()
    import torch

    if torch.version.cuda or torch.version.hip or torch.accelerator.current_accelerator() is not None:
        return False
    import mpt.engine.building.without_compiler
    import mpt.engine.loop.assembly
    import mpt.engine.loop.loop
    import mpt.engine.loop.resume
    import mpt.planner.server.beside
    import mpt.workflows.train  # noqa: F401

    gc.freeze()
    gc.enable()
    return True


def import_too(names: Sequence[str]) -> None:
    """Import what a fork had to import, for those that come."""
    new = sorted(set(names).difference(sys.modules))  # packages before what is in them
    if not new:
        return
    from mpt.vision_ops import import_torchvision

    gc.disable()
    with warnings.catch_warnings(action="ignore"):  # the fork has said them
        if "torchvision" in new:
            import_torchvision()
        for name in new:
            with contextlib.suppress(Exception):  # a name that its package made up, or something optional
                importlib.import_module(name)
    gc.freeze()
    gc.enable()


def imported_since(before: Set[str]) -> str:
    """Return the modules of libraries that this process has imported beside those of before, with spaces between."""
    names = [name for name in sys.modules if name not in before and name.split(".")[0] in LIBRARIES]
    names = [name for name in names if not name.startswith("mpt.parts.") and not name.endswith("__main__")]
    text = " ".join(names)
    return text if len(text.encode()) <= MOST_TOLD_BYTES else ""


def become(request: dict[str, Any], held: int, requests: int, telling: int) -> NoReturn:
    """Be the run that was asked for, with the streams of a process of its own."""
    code, before = 1, frozenset(sys.modules)
    try:
        errors = os.open(request["errors"], os.O_WRONLY | os.O_APPEND)
        output = os.open(request["output"], os.O_WRONLY)
        os.close(requests)
        os.environ |= request["environment"]
        for source, target in ((held, 0), (output, 1), (errors, 2)):
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
        with contextlib.suppress(OSError):
            os.write(telling, imported_since(before).encode())
        os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]), os.dup(0))
    os._exit(0)  # with what was frozen, taking everything apart would take long and find fault with torch
