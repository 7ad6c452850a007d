"""Stopping when asked, at a step's end: the first SIGINT or SIGTERM sets a flag, and the loop saves and leaves.

SIGHUP (a terminal that closes) and SIGUSR1 (what batch systems send ahead of the end) act as SIGTERM does. One that is
ignored already, as `nohup` arranges, stays ignored.

A step that takes minutes (the first of a large network on a CPU) is not waited for after SIGTERM or SIGHUP: whoever
sends them kills soon after. When `patience_seconds` are over, `Hurried` is raised in the main thread wherever it is,
unless the state is being saved. Outside of training `Terminated` is raised at once, so that temporary folders go.

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
from types import FrameType, TracebackType
from typing import Any, Self

from mpt.errors import Interrupted

IMPATIENT = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals after which a kill is near. SIGUSR1 comes well ahead of one, and Ctrl-C can be pressed twice."""
LEAST_PATIENCE, MOST_PATIENCE = 5.0, 25.0
STOPPING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGBREAK") if hasattr(signal, name)
)
"""The signals that stop a run. Windows has SIGBREAK (Ctrl-Break, a closed console) for SIGHUP and SIGUSR1."""
SHOW_CURSOR = b"\x1b[?25h"


class Hurried(BaseException):
    """A signal was not followed in time. Not an Exception: nothing may take it for a failure of its own."""


class Terminated(BaseException):
    """SIGTERM or SIGHUP outside of training."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"Stopped by {signal.Signals(signal_number).name}.")
        self.exit_code = 128 + signal_number


@contextlib.contextmanager
def terminated_cleanly() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP unwind the program instead of ending it where it stands."""
    owner = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            os._exit(128 + number)
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
        for number, handler in previous.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)


class StopRequest:
    """Within its block the signals of `STOPPING` set `signal_number`. Outside the main thread it does nothing."""

    patience_seconds = LEAST_PATIENCE
    """How long a step may go on after a signal that announces a kill."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.owner = os.getpid()
        self.previous: dict[int, Any] = {}
        self.timer: threading.Timer | None = None
        self.late = self.saving = False

    @property
    def requested(self) -> bool:
        """Was a signal received?"""
        return self.signal_number is not None

    def raise_if_requested(self, message: str) -> None:
        """Raise Interrupted with the exit code of the signal. Call after saving; `message` says what was saved."""
        if self.signal_number is not None:
            raise Interrupted(f"Stopped by {signal.Signals(self.signal_number).name}. {message}", self.signal_number)

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
        if self.signal_number is not None and hasattr(signal, "pthread_kill"):
            os.kill(self.owner, self.signal_number)
        elif self.signal_number is not None:  # os.kill of Windows ends the process
            _thread.interrupt_main(signal.Signals(self.signal_number))

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self.previous[number] = signal.signal(number, self.note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.saving = True  # what follows is the end in any case
        if self.timer is not None:
            self.timer.cancel()
        for number, handler in self.previous.items():
            # None means that a handler was installed outside Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self.previous.clear()

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
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
