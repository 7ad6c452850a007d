"""Stopping when asked, at a step's end: the first SIGINT or SIGTERM sets a flag, and the loop saves and leaves.

SIGHUP (a terminal that closes) and SIGUSR1 (what batch systems send ahead of the end) act as SIGTERM does. One that is
ignored already, as `nohup` arranges, stays ignored.

The handlers do nothing but note the signal, so a save in progress is simply finished. A second SIGINT is a person who
does not want to wait: the process ends at once, and the checkpoint before remains whole because saving is atomic.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from mpt.errors import Interrupted

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""The signals that stop a run; Windows lacks the last two."""
SHOW_CURSOR = b"\x1b[?25h"


class StopRequest:
    """Within its block the signals of `STOPPING` set `signal_number`. Outside the main thread it does nothing."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.owner = os.getpid()
        self.previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Was a signal received?"""
        return self.signal_number is not None

    def raise_if_requested(self, message: str) -> None:
        """Raise Interrupted with the exit code of the signal. Call after saving; `message` says what was saved."""
        if self.signal_number is not None:
            raise Interrupted(f"Stopped by {signal.Signals(self.signal_number).name}. {message}", self.signal_number)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self.previous[number] = signal.signal(number, self.note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


def restore_terminal() -> None:
    """Show the cursor, which a progress bar hides, without the locks that an interrupted print may hold."""
    for stream in (sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None and stream.isatty():
                os.write(stream.fileno(), SHOW_CURSOR + b"\n")
        except (OSError, ValueError):
            continue
