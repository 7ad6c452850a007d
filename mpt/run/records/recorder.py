"""Append-only records of a run: one JSON object per line, written whole, readable while it runs.

Each line is one `write` to a file opened for appending, so a reader sees whole lines and a kill loses at most the
last one. Lines are strict JSON: NaN and infinities are the strings "NaN", "Infinity" and "-Infinity", which `float`
reads back. `results.csv` is written anew from the evaluations each time, so it can never disagree with them. On
resume `truncate_after` drops lines after the checkpoint: those steps are about to be written again.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from mpt.foreign.files import bounded_lines, read_bytes
from mpt.foreign.text import csv_cell
from mpt.run.process.files import failures_explained, open_regular, open_to_append, write_atomically
from mpt.run.process.operating_system import NO_WAITING, open_file, read_at
from mpt.run.records.layout import RunDirectory

OF_PROCESSES = ("rank_lost",)
"""Kinds of events that happened to a process of the training, whatever step it was at."""


class Recorder:
    """Writes a run's metrics, events and results. Every line has `kind`, `step` and `time` (seconds since 1970)."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        for path in (run.metrics_path, run.events_path):
            drop_half_line(path)
        self.metrics = LineFile(run.metrics_path)
        self.events = LineFile(run.events_path)
        self.evaluations = evaluations_of(run)
        if self.evaluations and not is_whole(run.results_path, self.evaluations):
            write_results(run, self.evaluations)

    def write_metrics(
        self, step: int, values: Mapping[str, Any], kind: str = "train"
    ) -> dict[str, Any]:
        """Append one line to metrics.jsonl and return it."""
        line = {"kind": kind, "step": step, "time": time.time(), **values}
        self.metrics.append(line)
        return line

    def write_evaluation(
        self, step: int, metrics: Mapping[str, float], values: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Append an evaluation to metrics.jsonl, under `metrics`, and a row to results.csv; return the line."""
        line = self.write_metrics(
            step, {"metrics": dict(metrics), **(values or {})}, kind="evaluate"
        )
        self.evaluations.append((step, dict(metrics)))
        self.run.refuse_link()  # the file is written by its path, unlike the lines above
        write_results(self.run, self.evaluations)
        return line

    def write_event(
        self, step: int, kind: str, values: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Append one line to events.jsonl and return it."""
        line = {"kind": kind, "step": step, "time": time.time(), **(values or {})}
        self.events.append(line)
        return line

    def truncate_after(self, step: int, keep_events: bool = False) -> int:
        """Drop all lines after `step`, and unreadable ones; return how many. Call at resume, before the first write.

        `keep_events` leaves events.jsonl as it is: a run that rolled back within one process keeps the story of why.
        Events of processes belong to no step, and stay.
        """
        dropped = 0
        for file in (self.metrics,) if keep_events else (self.metrics, self.events):
            surplus = sum(not is_kept(line, step) for _, line in read_raw_lines(file.path))
            if surplus:
                lines = read_raw_lines(file.path)
                kept = b"".join(raw for raw, line in lines if is_kept(line, step))
                # first: if it fails, the file stays as it is, and open
                write_atomically(file.path, kept)
                file.reopen()
            dropped += surplus
        self.evaluations = evaluations_of(self.run)
        if self.evaluations or self.run.results_path.exists():
            write_results(self.run, self.evaluations)
        return dropped

    def sync(self) -> None:
        """Make all lines so far durable. Call alongside each checkpoint; a sync per line would cost more than a
        step."""
        for file in (self.metrics, self.events):
            with failures_explained(file.path):
                os.fsync(file.descriptor)

    def reopen_removed(self) -> list[str]:
        """Begin anew the files that were removed or replaced since they were opened; return their names."""
        removed = [file for file in (self.metrics, self.events) if file.is_removed()]
        for file in removed:
            file.reopen()
        return [file.path.name for file in removed]

    def close(self) -> None:
        """Close the files."""
        self.metrics.close()
        self.events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LineFile:
    """A file to which whole lines are appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open()

    def open(self) -> None:
        """Open for appending, creating the file if need be. Links, pipes and devices are refused."""
        with failures_explained(self.path):
            self.descriptor = open_to_append(self.path)

    def is_removed(self) -> bool:
        """Is the file that has the path now, if any, another one?"""
        try:
            return not os.path.samestat(os.fstat(self.descriptor), os.lstat(self.path))
        except FileNotFoundError:
            return True

    def reopen(self) -> None:
        """Continue with the file that has the path now."""
        before = self.descriptor
        self.open()
        os.close(before)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one object as one line in one system call, or nothing of it."""
        data = encode(line).encode() + b"\n"
        with failures_explained(self.path, len(data)):
            size = os.fstat(self.descriptor).st_size
            written = 0
            try:
                # a nearly full disk takes a part first and fails at the next call
                while written < len(data):
                    written += os.write(self.descriptor, data[written:])
            except OSError:
                os.ftruncate(self.descriptor, size)
                raise

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def encode(line: Mapping[str, Any]) -> str:
    """Return one line of strict JSON. Most lines are that as they are; the others are made `tidy` first."""
    try:
        return json.dumps(line, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):
        return json.dumps(tidy(line), allow_nan=False, separators=(",", ":"))


def tidy(value: Any) -> Any:
    """Return a value as strict JSON knows it: numbers that it lacks as text, keys as text, tuples as lists."""
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): tidy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [tidy(item) for item in value]
    return value


def read_raw_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line of a file as bytes and as an object, None if it is none. No file, no lines."""
    if not path.exists():
        return
    with failures_explained(path), os.fdopen(open_regular(path), "rb") as file:
        for raw in bounded_lines(file):
            try:
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except (ValueError, RecursionError):
                line = None
            yield raw, line if isinstance(line, dict) else None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of lines, leaving out a half-written last line and others that are none."""
    return (line for _, line in read_raw_lines(path) if line is not None)


def is_kept(line: Mapping[str, Any] | None, step: int) -> bool:
    """Is a line that could be read left when a run goes back to a step? One without a step belongs to none."""
    if line is None:
        return False
    number = line.get("step")
    return not isinstance(number, int) or number <= step or line.get("kind") in OF_PROCESSES


def drop_half_line(path: Path) -> None:
    """Cut off a last line that has no end, so that the next line does not grow onto it."""
    if not path.exists():
        return
    with failures_explained(path):
        descriptor = open_file(path, os.O_RDWR | NO_WAITING)
        try:
            end = position = os.fstat(descriptor).st_size
            while position > 0:
                start = max(0, position - 65536)
                newline = read_at(descriptor, position - start, start).rfind(b"\n")
                if newline >= 0:
                    position = start + newline + 1
                    break
                position = start
            if position < end:
                os.ftruncate(descriptor, position)
        finally:
            os.close(descriptor)


def last_test_set(run: RunDirectory, step: int | None = None) -> str | None:
    """Return the hash of the test set that the last evaluation recorded, of a step if one is named; None if none
    did.
    """
    lines = [
        line
        for line in read_lines(run.metrics_path)
        if line.get("kind") == "evaluate" and line.get("test_set")
    ]
    lines = [line for line in lines if step is None or line.get("step") == step]
    return str(lines[-1]["test_set"]) if lines else None


def evaluations_of(run: RunDirectory) -> list[tuple[int, dict[str, Any]]]:
    """Return step and metrics of each evaluation that was recorded."""
    lines = (line for line in read_lines(run.metrics_path) if line.get("kind") == "evaluate")
    return [
        (line["step"], dict(line["metrics"]))
        for line in lines
        if isinstance(line.get("metrics"), dict) and isinstance(line.get("step"), int)
    ]


def write_results(run: RunDirectory, evaluations: list[tuple[int, dict[str, Any]]]) -> None:
    """Write results.csv. It is not synced: after a power loss the next writer makes it anew."""
    write_atomically(run.results_path, results_of(evaluations), durable=False)


def is_whole(path: Path, evaluations: list[tuple[int, dict[str, Any]]]) -> bool:
    """Return whether results.csv holds these evaluations."""
    expected = results_of(evaluations).encode()
    try:
        return path.stat().st_size == len(expected) and read_bytes(path, len(expected)) == expected
    except OSError:
        return False


def results_of(evaluations: list[tuple[int, dict[str, Any]]]) -> str:
    """Return results.csv: a row per evaluation, a column per metric that any of them has."""
    columns = list(dict.fromkeys(name for _, metrics in evaluations for name in metrics))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *map(csv_cell, columns)])
    for step, metrics in evaluations:
        writer.writerow([step, *(csv_cell(metrics.get(name, "")) for name in columns)])
    return text.getvalue()
