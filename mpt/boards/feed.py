"""A board on a thread of its own, behind a queue: whatever a board does or fails to do, training continues.

Calls wait in the queue while a board is slow. One that raises (`SystemExit` included), does not return from a call in
time or lets the queue grow full is left out from then on. A thread cannot be ended from outside: that of a call that
never returns stays behind, and ends with the process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

CALL_SECONDS = 120.0
"""How long one call may take; wandb gives itself 90 seconds to reach its server."""
END_SECONDS = 60.0
"""How long the end of the training waits for a board to take all that is in its queue."""
HURRIED_SECONDS = 3.0
"""The same after a signal to stop."""
MOST_WAITING = 10_000
"""Calls that may wait."""
LOOK_SECONDS = 0.05


Pictures = Mapping[str, Path]
"""Name -> PNG file."""


class Board:
    """One place that numbers go to. The names of numbers have slashes."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a step."""

    def picture(self, step: int, path: Path, name: str = "preview") -> None:
        """Take a PNG file: a preview of the run, or a drawing of it."""

    def close(self) -> None:
        """Write out pending entries."""


class Feed:
    """One board and the calls that wait for it."""

    def __init__(self, open_board: Callable[[], Board]) -> None:
        """Begin to open the board, on the thread."""
        self.problem: str | None = None
        """Why the board is left out."""
        self.calls: queue.SimpleQueue[Callable[[Board], None] | None] = queue.SimpleQueue()
        self.busy_since: float | None = time.monotonic()
        """When the call began that runs now."""
        self.thread = threading.Thread(
            target=self._run, args=(open_board,), name="mpt-board", daemon=True
        )
        self.thread.start()

    def put(self, call: Callable[[Board], None]) -> None:
        """Let the board do something, after all that waits."""
        if self.problem is None:
            self.calls.put(call)
            if self.calls.qsize() > MOST_WAITING:
                self.problem = f"it does not keep up, and {MOST_WAITING} calls wait for it"

    def look(self) -> str | None:
        """Return why the board is left out, None for one that is not."""
        since = self.busy_since
        if self.problem is None and since is not None and time.monotonic() - since > CALL_SECONDS:
            self.problem = f"it has not answered for {time.monotonic() - since:.0f} s"
        return self.problem

    def close(self, is_hurried: Callable[[], bool]) -> str | None:
        """Close the board after all that waits, within its time; return why it is left out, None if it is not."""
        self.calls.put(None)
        begun = time.monotonic()
        while self.problem is None and self.thread.is_alive():
            seconds = time.monotonic() - begun
            if seconds > (HURRIED_SECONDS if is_hurried() else END_SECONDS):
                self.problem = f"it did not take the last lines within {seconds:.0f} s"
            self.thread.join(LOOK_SECONDS)
        return self.problem

    def _run(self, open_board: Callable[[], Board]) -> None:
        try:
            board = open_board()
            while self.problem is None:
                self.busy_since = None
                call = self.calls.get()
                self.busy_since = time.monotonic()
                if call is None:
                    board.close()
                    return
                call(board)
        except (
            BaseException
        ) as error:  # a board's own errors are of many kinds, SystemExit among them
            self.problem = (str(error).strip() or type(error).__name__).splitlines()[0]
