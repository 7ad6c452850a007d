"""Progress of a training run: a progress bar on a terminal, plain lines elsewhere, JSON lines for programs.

All three show the same row: step, losses, images per second, memory, loss scales. Every plain line begins with the
time, messages and warnings too, because it is read hours later. An output that cannot be written any more
(`| head -1`, a full disk, a closed terminal) ends the talking, never the training.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, TextIO, cast

from mpt.config.sizes import format_bytes
from mpt.foreign.text import harmless, unguarded

Style = Literal["auto", "plain", "json", "quiet"]
KEEP_TITLE, GIVE_TITLE_BACK = "\x1b[22;0t", "\x1b[23;0t"
"""Put the terminal's title aside, and take it back (xterm's window manipulation, which others pass over)."""
SLOW = 10
"""Samples per second below which the whole ones would not say enough."""


def describe_row(row: Mapping[str, Any]) -> str:
    """Return one metrics row as a line of text."""
    figures = {**row.get("losses", {}), **row.get("logged", {})}
    parts = [f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, float)]
    if "samples_per_second" in row:
        pace = row["samples_per_second"]
        parts.append(f"{pace:.0f} samples/s" if pace >= SLOW else f"{pace:.2g} samples/s")
    peak = row.get("memory", {}).get("peak_bytes")
    if peak:
        parts.append(f"peak {format_bytes(peak)}")
    if "device_utilization" in row:
        parts.append(f"busy {100 * row['device_utilization']:.0f} %")
    scales = row.get("scale", {})
    if scales:
        parts.append("scale " + " ".join(f"{name} {value:.10g}" for name, value in scales.items()))
    skipped = {name: count for name, count in row.get("skipped", {}).items() if count}
    if skipped:
        parts.append("skipped " + " ".join(f"{name} {count}" for name, count in skipped.items()))
    return "  ".join(parts)


class Outlet:
    """A text stream that discards everything from its first failure on."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.is_lost = stream is None

    @property
    def encoding(self) -> str:
        """The stream's encoding, which rich asks for."""
        return getattr(self.stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Return whether this is a terminal that can be written to."""
        return not self.is_lost and self.stream is not None and self.stream.isatty()

    def fileno(self) -> int:
        """Return the stream's descriptor; OSError if it has none."""
        if self.stream is None:
            raise OSError("there is no stream")
        return self.stream.fileno()

    def write(self, text: str) -> int:
        """Write, or note that it cannot be done any more."""
        if not self.is_lost and self.stream is not None:
            try:
                self.stream.write(text)
            except (OSError, ValueError):  # ValueError: it was closed
                self.give_up()
        return len(text)

    def flush(self) -> None:
        """Flush, or note that it cannot be done any more."""
        if not self.is_lost and self.stream is not None:
            try:
                self.stream.flush()
            except (OSError, ValueError):
                self.give_up()

    def give_up(self) -> None:
        """Discard from here on, the stream's buffer included: the interpreter would fail on it at its end."""
        self.is_lost = True
        try:
            assert self.stream is not None
            descriptor = self.stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
        except (OSError, ValueError):
            return


class Console:
    """Prints rows and messages in one of the styles. `auto` is a bar on a terminal and plain lines elsewhere."""

    def __init__(self, style: Style, total_steps: int, stream: TextIO | None = None) -> None:
        self.stream = Outlet(unguarded(stream or sys.stderr))  # the bar needs escape sequences
        self.rows = Outlet(sys.stdout)
        """The stream of JSON rows."""
        self.style = style
        self.total_steps = total_steps
        self.progress: Any = None
        self.bar: Any = None
        self.percent = -1
        """The terminal's title."""

    def __enter__(self) -> Console:
        if self.style == "auto" and self.stream.isatty():
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
            from rich.table import Column

            # The figures take the rest and are cut: on a narrow terminal steps, bar and time stay whole.
            rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            columns = (
                TextColumn("{task.completed}/{task.total}", table_column=Column(no_wrap=True)),
                BarColumn(16),
                TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
                TextColumn("{task.description}", markup=False, table_column=rest),
            )
            self.progress = Progress(
                *columns, console=RichConsole(file=cast(TextIO, self.stream)), expand=True
            )
            self.progress.start()
            self.stream.write(KEEP_TITLE)
            self.bar = self.progress.add_task("", total=self.total_steps)
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
            self.stream.write(GIVE_TITLE_BACK)
            self.stream.flush()

    def row(self, row: Mapping[str, Any]) -> None:
        if self.style == "json":
            print(json.dumps(dict(row)), file=self.rows, flush=True)
        elif self.style == "quiet":
            return
        elif row.get("kind") == "evaluate":
            figures = "  ".join(f"{name} {value:.4g}" for name, value in row["metrics"].items())
            on = f" on {row['test_samples']} test samples" if "test_samples" in row else ""
            self.message(f"step {row['step']}/{self.total_steps}  evaluated{on}: {figures}")
        elif self.progress is not None:
            self.progress.update(
                self.bar, completed=row["step"], description=harmless(describe_row(row))
            )
        else:
            self.print_plain(f"step {row['step']}/{self.total_steps}  {describe_row(row)}")

    def advance(self, step: int) -> None:
        """Move the bar without changing its text, and say in the terminal's title how far the run is."""
        if self.progress is None:
            return
        self.progress.update(self.bar, completed=step)
        percent = 100 * step // max(self.total_steps, 1)
        if percent != self.percent:
            self.percent = percent
            self.stream.write(f"\x1b]0;mpt {percent} %, step {step}/{self.total_steps}\x07")

    def message(self, text: str) -> None:
        if self.style in ("quiet", "json"):
            return
        if self.progress is not None:
            self.progress.console.print(harmless(text), markup=False, highlight=False)
        else:
            self.print_plain(text)

    def warning(self, text: str) -> None:
        """Say something that the user should act on, in every style but JSON (it is an event there)."""
        if self.style == "json":
            return
        text = f"warning: {text}"
        if self.progress is not None:
            self.progress.console.print(
                harmless(text), style="yellow", markup=False, highlight=False
            )
        else:
            self.print_plain(text)

    def print_plain(self, text: str) -> None:
        """Print lines for a log, each with the time before it."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        for line in harmless(text).splitlines() or [""]:
            print(f"{now}  {line}".rstrip(), file=self.stream, flush=True)
