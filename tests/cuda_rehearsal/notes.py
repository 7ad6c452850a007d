"""What happens on the device and is worth knowing, each with the Python line that caused it.

| Kind | What happened |
|---|---|
| `wait` | the host waits until queued work is done, which a step should never do |
| `race` | work that no event, wait or `record_stream` orders: see order.cpp |
| `float64` | an operator on more than one float64 number, 32 to 64 times as slow on most cards |
| `float32`, `tf32` | a product of float32 numbers, as it is or in TensorFloat-32 |
| `layout` | a convolution of which one of image and weight is channels last: cuDNN transposes the other |
| `order` | an operator that adds in any order, so that results do not repeat bit for bit |

Races are always kept, and written to the standard error as they happen; the others while somebody listens.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OWN = (
    *(
        str(Path(__file__).with_name(name))
        for name in ("notes.py", "torch_cuda.py", "device_memory.py")
    ),
    "/torch/",
)


@dataclass(frozen=True)
class Note:
    """What happened, and the innermost line outside torch ("" in a backward pass without one)."""

    kind: str
    what: str
    line: str
    function: str = ""
    step: int = 0
    """How many steps had begun."""
    in_step: bool = False
    update: int = 0
    """The number of the phase's update in which it was, from 1 on; 0 outside of them."""

    def __str__(self) -> str:
        return f"{self.what} at {self.line or 'no Python line (inside a backward pass)'}"


class Record:
    """The notes so far, of the kinds that somebody listens for."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.races: list[Note] = []
        self.listening: list[str] = []
        self.steps = self.updates = self.update = 0
        self.in_step = False
        self.capturing: Any = None
        """What is written down of a graph that is being recorded, in which the host may not wait."""
        self.warns = False
        self.tell: Callable[[list[str]], object] = lambda kinds: None
        """Tells the extension which kinds are wanted."""

    def __call__(self, kind: str, what: str) -> None:
        """Take a note; called by the extension with the interpreter's lock held."""
        note = Note(kind, what, *next(_lines(), ("", "")), self.steps, self.in_step, self.update)
        if kind == "wait" and self.capturing is not None:
            self.capturing.broken = self.capturing.broken or f"the host waits: {note}"
        if kind == "race":
            self.races.append(note)
            print(f"pretend CUDA: {note}", file=sys.stderr)
        if kind in self.listening:
            self.notes.append(note)
        if kind == "wait" and self.warns:
            file, _, number = note.line.rpartition(":")
            words = "called a synchronizing CUDA operation"
            warnings.warn_explicit(words, UserWarning, file or "<unknown>", int(number or 0))

    def warn_of_waits(self, wanted: bool) -> None:
        """Warn of each wait at its line, as `torch.cuda.set_sync_debug_mode` does, or no longer."""
        if wanted:
            words = "Synchronization debug mode is a prototype feature and does not yet detect all"
            words += " synchronizing operations"
            warnings.warn(words, UserWarning, stacklevel=1)
        if wanted != self.warns:
            self.warns = wanted
            (self.listening.append if wanted else self.listening.remove)("wait")
            self.tell(self.listening)

    @contextlib.contextmanager
    def listen(self, *kinds: str) -> Iterator[list[Note]]:
        """Yield a list that the block's notes are written to; waits, unless other kinds are named."""
        before = len(self.notes)
        found: list[Note] = []
        wanted = list(kinds or ("wait",))
        self.listening += wanted
        self.tell(self.listening)
        try:
            yield found
        finally:
            for kind in wanted:
                self.listening.remove(kind)
            self.tell(self.listening)
            found += [note for note in self.notes[before:] if note.kind in wanted]
            del self.notes[before:]

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Give the block's notes the step and the update of a training in which they are."""
        from mpt.engine.loop import loop
        from mpt.engine.recovery import out_of_memory

        advance, update = loop.advance, out_of_memory.update
        self.steps = self.updates = 0

        def counted_advance(*args: Any) -> Any:
            self.steps, self.in_step = self.steps + 1, True
            try:
                return advance(*args)
            finally:
                self.in_step = False

        def counted_update(*args: Any, **options: Any) -> Any:
            self.updates += 1
            self.update = self.updates
            try:
                return update(*args, **options)
            finally:
                self.update = 0

        loop.advance, out_of_memory.update = counted_advance, counted_update
        try:
            yield
        finally:
            loop.advance, out_of_memory.update = advance, update


def _lines() -> Iterator[tuple[str, str]]:
    """Yield this thread's lines outside torch and this folder with their functions, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if (
            not any(part in path for part in OWN)
            and not path.startswith("<frozen")
            and path != threading.__file__
        ):
            inside = Path(path).is_relative_to(ROOT)
            short = str(Path(path).relative_to(ROOT)) if inside else path
            yield f"{short}:{frame.f_lineno}", frame.f_code.co_qualname
        frame = frame.f_back  # type: ignore[assignment]
