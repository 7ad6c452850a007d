"""Where the host waits for the device: every synchronisation with the Python line that caused it.

In a real run such a line stops the processor until all queued work is done, which a step should never do.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN = (*(str(Path(__file__).with_name(name)) for name in ("waits.py", "torch_cuda.py", "device_memory.py")), "/torch/")


@dataclass(frozen=True)
class Wait:
    """One synchronisation: what caused it, and the innermost line outside torch ("" in a backward pass without one)."""

    what: str
    line: str
    function: str = ""

    def __str__(self) -> str:
        return f"{self.what} at {self.line or 'no Python line (inside a backward pass)'}"


class Record:
    """The waits so far, while somebody listens."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.listening = 0

    def __call__(self, what: str) -> None:
        """Note a wait; called by the extension with the interpreter's lock held."""
        if not self.listening:
            return
        self.waits.append(Wait(what, *next(_lines(), ("", ""))))

    @contextlib.contextmanager
    def listen(self) -> Iterator[list[Wait]]:
        """Yield a list that the block's waits are written to."""
        before = len(self.waits)
        found: list[Wait] = []
        self.listening += 1
        try:
            yield found
        finally:
            self.listening -= 1
            found += self.waits[before:]
            del self.waits[before:]


def _lines() -> Iterator[tuple[str, str]]:
    """Yield this thread's lines outside torch and this folder with their functions, innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(part in path for part in OWN) and not path.startswith("<frozen") and path != threading.__file__:
            short = str(Path(path).relative_to(ROOT)) if path.startswith(str(ROOT)) else path
            yield f"{short}:{frame.f_lineno}", frame.f_code.co_qualname
        frame = frame.f_back  # type: ignore[assignment]
