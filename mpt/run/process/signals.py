"""Stopping when asked, at a step's end: the first SIGINT or SIGTERM sets a flag, and the loop saves and leaves.

SIGHUP (a terminal that closes) and SIGUSR1 (sent by batch systems ahead of the end) act as SIGTERM does. One that is
ignored already, as `nohup` arranges, stays ignored.

A step that takes minutes (the first of a large network on a CPU) is not waited for after SIGTERM or SIGHUP: whoever
sends them kills soon after. When `patience_seconds` are over, `Hurried` is raised in the main thread wherever it is,
unless the state is being saved. Outside of training `Terminated` is raised at once, so that temporary folders go, and
again if it got lost: Python drops exceptions in a callback of a weak reference. While a module is imported it
waits: there torch's C++ code would abort with a stack of its own, or lose it.

The handlers do nothing else but note the signal, so a save in progress is simply finished. A second SIGINT is a person
who does not want to wait: the process ends at once, and the checkpoint before remains whole because saving is atomic.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

from mpt.errors import Interrupted, Terminated

IMPATIENT = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals after which a kill is near. SIGUSR1 comes well ahead of one, and Ctrl-C can be pressed twice."""
LEAST_PATIENCE, MOST_PATIENCE = 5.0, 25.0
STOPPING = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGBREAK")
    if hasattr(signal, name)
)
"""The signals that stop a run. Windows has SIGBREAK (Ctrl-Break, a closed console) for SIGHUP and SIGUSR1."""
AGAIN_SECONDS = 0.25
"""After so long `Terminated` is raised again, unless it is on its way through the program."""
MOST_WAITS = 12
"""The number of times that it waits for an import to end: three seconds."""
SHOW_CURSOR = b"\x1b[?25h"


class Hurried(BaseException):
    """A signal was not followed in time. Not an Exception: nothing may take it for a failure of its own."""


@contextlib.contextmanager
def terminated_cleanly() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP unwind the program instead of ending it at once."""
    owner, over = os.getpid(), threading.Event()
    reminders: list[threading.Thread] = []
    waits = 0

    def remind(number: int) -> None:
        while not over.wait(AGAIN_SECONDS):
            signal_main_thread(owner, number)

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            os._exit(128 + number)
        nonlocal waits
        if is_ending(sys.exception()):
            return
        if not reminders:
            reminders.append(threading.Thread(target=remind, args=(number,), daemon=True))
            reminders[0].start()
        if is_importing(frame) and waits < MOST_WAITS:
            waits += 1
            return
        raise Terminated(number)

    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.getsignal(number) for number in IMPATIENT}
        for number, handler in previous.items():
            if handler is signal.SIG_DFL:
                signal.signal(number, end)
    try:
        yield
    finally:
        over.set()
        for reminder in reminders:
            reminder.join()
        for number, handler in previous.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)


def is_ending(error: BaseException | None) -> bool:
    """Return whether the exception being handled is, or came up during, a `Terminated` that unwinds the program."""
    while error is not None:
        if isinstance(error, Terminated):
            return True
        error = error.__context__
    return False


def is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported at this moment."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def signal_main_thread(owner: int, number: int) -> None:
    """Let this process's main thread have a signal, from another thread."""
    if hasattr(signal, "pthread_kill"):
        os.kill(owner, number)
    else:  # os.kill of Windows ends the process
        _thread.interrupt_main(signal.Signals(number))


class StopRequest:
    """Within its block the signals of `STOPPING` set `signal_number`. Outside the main thread it does nothing."""

    patience_seconds = LEAST_PATIENCE
    """How long a step may take after a signal that announces a kill."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.owner = os.getpid()
        self.previous: dict[int, Any] = {}
        self.timer: threading.Timer | None = None
        self.late = self.saving = False

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    def raise_if_requested(self, message: str) -> None:
        """Raise Interrupted with the exit code of the signal. Call after saving; `message` names the saved state."""
        if self.signal_number is not None:
            raise Interrupted(
                f"Stopped by {signal.Signals(self.signal_number).name}. {message}",
                self.signal_number,
            )

    def expect(self, step_seconds: float) -> None:
        """Be as patient as steps of this length want, within bounds."""
        self.patience_seconds = min(max(2 * step_seconds, LEAST_PATIENCE), MOST_PATIENCE)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within the block, in which the state is saved, nothing is cut short."""
        self.saving = True
        try:
            yield
        finally:
            self.saving = False

    def hurry(self) -> None:
        """Let the main thread know that the time is over; runs in a thread of its own."""
        self.late = True
        if self.signal_number is not None:
            signal_main_thread(self.owner, self.signal_number)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self.previous[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        self.saving = True  # the end comes in any case
        if self.timer is not None:
            self.timer.cancel()
        for number, handler in self.previous.items():
            # None means that a handler was installed outside Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self.previous.clear()

    def note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.owner:
            # A forked data worker. Ctrl-C reaches it too, but the run ends it; being told to end, it ends.
            if number != signal.SIGINT:
                os._exit(128 + number)
            return
        if number == signal.SIGINT and self.requested:
            restore_terminal()
            os._exit(128 + number)
        if self.signal_number is None:
            self.signal_number = number
            if number in IMPATIENT:
                self.timer = threading.Timer(self.patience_seconds, self.hurry)
                self.timer.daemon = True
                self.timer.start()
        elif self.late and not self.saving:
            self.late = False
            raise Hurried


def restore_terminal() -> None:
    """Show the cursor, which a progress bar hides, without the locks that an interrupted print may hold."""
    for stream in (sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None and stream.isatty():
                os.write(stream.fileno(), SHOW_CURSOR + b"\n")
        except (OSError, ValueError):
            continue
