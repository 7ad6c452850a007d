"""Commands of mpt in forked processes with a fault at a chosen file operation, for `scripts/faults/fault_battery.py`.

Everything is imported once, in a process that runs no command itself; each command is a fork of it, so a training of a
few steps takes the time of its steps. Faults come from a small library (`fault_battery_preload.c`) compiled when the
battery starts, which sees every write of the process; where no compiler is, `os` is patched, which misses writes of
Python's own file objects.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 180.0
"""Beyond this a command hangs. None takes more than two seconds by itself; the machine may be busy."""
KILL, FAIL, FAIL_ON, SIGNAL, TEAR = range(1, 6)
"""Die before the operation; fail once; fail from there on; receive a signal and go on; write half of it and die."""
LIBRARY = "MPT_FAULT_LIBRARY"
PREFIX = "mpt-faults-"
"""Of the battery's folders; the number of its process follows."""
SYSTEM = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
DEATH_SIGNAL, SUBREAPER = 1, 36
"""Requests of prctl(2)."""
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What tells the battery to end."""
PATCHED = ("open", "write", "fsync", "ftruncate", "mkdir", "rename", "replace", "unlink", "rmdir")


@dataclass(frozen=True)
class Fault:
    """What happens at the `at`-th operation below a folder, counted from 1; `at=-1` only counts."""

    folder: Path
    at: int = -1
    action: int = 0
    detail: int = 0


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (minus the signal's number where one killed it), words and operations."""

    code: int
    text: str
    operations: int = 0
    hung: bool = False

    @property
    def is_traceback(self) -> bool:
        """Did the command end with a mistake of ours?"""
        return "Traceback (most recent call last)" in self.text or self.hung


def build_library(folder: Path) -> Path | None:
    """Compile the library; None where there is no compiler."""
    compiler = next(
        (found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None
    )
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    target = folder / "faults.so"
    source = Path(__file__).with_name("fault_battery_preload.c")
    made = subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", str(target), str(source), "-ldl"],
        capture_output=True,
        check=False,
    )
    return target if made.returncode == 0 else None


def begin_with_library() -> None:
    """Start this program again with the library that sees every write, where it can be built.

    In the program that was started again its file is removed, since it is loaded: so a kill leaves nothing.
    """
    if LIBRARY in os.environ:
        if library := os.environ[LIBRARY]:
            os.environ.pop("LD_PRELOAD", None)  # programs that commands start would miss it
            shutil.rmtree(Path(library).parent, ignore_errors=True)
        return
    folder = make_folder(Path(tempfile.gettempdir()))
    library = build_library(folder)
    if library is None:
        folder.rmdir()
    environment = {
        **os.environ,
        LIBRARY: str(library or ""),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if library is None:
        print("no C compiler: faults are injected into Python's os alone", file=sys.stderr)
    else:
        environment["LD_PRELOAD"] = str(library)
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def arm(fault: Fault) -> Callable[[], int]:
    """Let this process meet the fault; return what tells the operations so far."""
    if os.environ.get(LIBRARY):
        loaded = ctypes.CDLL(None)  # it is loaded, and its file is gone
        loaded.counted.restype = ctypes.c_long
        loaded.arm(os.fsencode(fault.folder), ctypes.c_long(fault.at), fault.action, fault.detail)
        return lambda: int(loaded.counted())
    return arm_in_python(fault)


def arm_in_python(fault: Fault) -> Callable[[], int]:
    """Patch `os`. Operations on descriptors and on names in opened folders are taken for some of the folder."""
    count = 0

    def wrap(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            first = arguments[0]
            elsewhere = (
                isinstance(first, str | Path)
                and os.path.isabs(first)
                and not is_below(first, fault.folder)
            )
            reading = name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if elsewhere or reading or first in (1, 2):
                return real(*arguments, **options)
            count += 1
            if count == fault.at or (fault.action == FAIL_ON and 0 < fault.at < count):
                if fault.action in (KILL, TEAR):
                    if fault.action == TEAR and name == "write":
                        real(first, bytes(arguments[1])[: len(arguments[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault.action in (FAIL, FAIL_ON):
                    raise OSError(fault.detail, os.strerror(fault.detail))
                os.kill(os.getpid(), fault.detail)
            return real(*arguments, **options)

        return call

    for name in PATCHED:
        setattr(os, name, wrap(name))
    return lambda: count


def is_below(path: str | Path, folder: Path) -> bool:
    """Does a path lie in a folder?"""
    return os.fspath(path).startswith(os.fspath(folder))


@dataclass
class Running:
    """A command that was started and not waited for."""

    pid: int
    output: Path
    counted: int
    """The reading end of a pipe that the command's operations come through."""

    def wait(self, seconds: float = LIMIT_SECONDS) -> Ended:
        """Return how it ended; one that takes too long is killed."""
        deadline, hung = time.monotonic() + seconds, False
        # The pipe is closed by the process's end, so this waits without polling.
        while (
            not hung
            and not select.select([self.counted], [], [], max(0.0, deadline - time.monotonic()))[0]
        ):
            hung = True
            os.kill(self.pid, signal.SIGKILL)
        told = os.read(self.counted, 64)
        os.close(self.counted)
        status = os.waitpid(self.pid, 0)[1]
        text = self.output.read_text("utf-8", errors="replace") if self.output.is_file() else ""
        return Ended(os.waitstatus_to_exitcode(status), text, int(told or 0), hung)


def start(
    work: Callable[[], None] | Sequence[str],
    output: Path,
    fault: Fault | None = None,
    streams: Callable[[], None] | None = None,
    memory_bytes: int | None = None,
    modules: Path | None = None,
) -> Running:
    """Run a function, or the words of a command line, in a fork; `streams` may replace its output.

    The names of what it has imported in the end are written to `modules`.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent, pid = os.getpid(), os.fork()
    if pid:
        os.close(writing)
        return Running(pid, output, reading)
    code, tell = 1, int
    try:
        die_with(parent)
        for number in ENDING:
            if callable(signal.getsignal(number)):  # the battery's own; what is ignored stays so
                signal.signal(number, signal.SIG_DFL)
        os.close(reading)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(descriptor, number)
        if streams is not None:
            streams()
            open_streams()
        if memory_bytes is not None:
            limit_memory(memory_bytes)
        if fault is not None:
            tell = arm(fault)
        code = perform(work)
        if modules is not None:
            modules.write_text(json.dumps(list(sys.modules)))
    finally:
        with contextlib.suppress(OSError):
            os.write(writing, str(tell()).encode())
        os._exit(code)


def die_with(parent: int) -> None:
    """Let this process be killed when the one that started it ends, however that ends."""
    if SYSTEM is not None:
        SYSTEM.prctl(DEATH_SIGNAL, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of what is left of commands whose worker ends."""
    if SYSTEM is not None:
        SYSTEM.prctl(SUBREAPER, 1)


def clean_up_when_told_to_end() -> None:
    """Let a signal that would end this process at once unwind it instead."""
    adopt_orphans()
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda signum, frame: sys.exit(128 + signum))


def end_all(running: Sequence[Running], seconds: float = 10.0) -> None:
    """Kill what still runs, and wait until it and what it had started are gone."""
    for one in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)


def make_folder(parent: Path) -> Path:
    """Return a new folder of this battery in a folder for temporary ones, and remove those of batteries that were
    killed.
    """
    for left in parent.glob(f"{PREFIX}*-*"):
        number = left.name.removeprefix(PREFIX).split("-")[0]
        if number.isdecimal() and not is_running(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))


def is_running(pid: int) -> bool:
    """Is there a process of this number?"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def open_streams() -> None:
    """Open `sys.stdout` and `sys.stderr` as Python does at its start, which is None for a closed descriptor."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            setattr(sys, name, None)
        else:
            stream = io.TextIOWrapper(
                io.FileIO(number, "w", closefd=False), line_buffering=number == 2
            )
            setattr(sys, name, stream)


def limit_memory(added_bytes: int) -> None:
    """Let this process take so much more address space than it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + added_bytes, resource.RLIM_INFINITY))


def perform(work: Callable[[], None] | Sequence[str]) -> int:
    """Do the work as the command line would; return the exit code."""
    from mpt.cli import main

    try:
        if callable(work):
            work()
        else:
            main(list(work))
    except SystemExit as ended:
        code = ended.code
        return code if isinstance(code, int) else 0 if code is None else 1
    except KeyboardInterrupt:
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
    return 0


def call(
    work: Callable[[], None] | Sequence[str],
    output: Path,
    fault: Fault | None = None,
    **options: Any,
) -> Ended:
    """Run a command to its end."""
    return start(work, output, fault, **options).wait()


ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
