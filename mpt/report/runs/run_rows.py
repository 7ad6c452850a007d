"""A run's row in a table of many: read one after the other, so that memory does not grow with their logs.

No plots are imported: `mpt list runs` is as quick as reading the files.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mpt.config.text.yaml_text import printable
from mpt.errors import CheckpointError, DataError
from mpt.report.reading.log_values import number
from mpt.report.reading.read_run import read_outline
from mpt.report.reading.run_record import RunRecord
from mpt.report.runs.run_index import as_entry, from_entry, read_index, signature, write_index
from mpt.run.records.layout import list_runs, writing_times


@dataclass(frozen=True)
class RunRow:
    """A run's row; figures that are not there are NaN."""

    path: Path
    name: str
    model: str
    dataset: str
    mode: str
    dtype: str
    seed: int | None
    steps: int
    state: str
    is_finished: bool
    metric: str
    higher_is_better: bool
    final: float
    best: float
    peak_bytes: float
    step_seconds: float
    samples_per_second: float
    skipped: int
    trained: str
    given: str
    """The settings of the command line that began the run: they distinguish several runs of one name."""

    @property
    def link(self) -> str:
        """The path of the run's report from the folder of the runs; empty if there is none."""
        return (
            f"{quote(os.fsencode(self.name))}/report.html"
            if (self.path / "report.html").is_file()
            else ""
        )


def read_rows(runs_dir: Path) -> list[RunRow]:
    """Return a row per run, the last trained first; of each run no more than its row is kept.

    Raises CheckpointError if the folder has no run.
    """
    known = read_index(runs_dir)
    entries: dict[str, Any] = {}
    rows = []
    for directory in list_runs(runs_dir):
        # before it is read: a run in training has changed by the next time
        made_of = signature(directory.path)
        row = from_entry(known.get(directory.path.name), RunRow, directory.path, made_of)
        row = row or row_or_none(directory.path)
        if row is not None:
            rows.append(row)
            entries[row.name] = as_entry(row, made_of)
    if entries != known and rows:
        write_index(runs_dir, entries)
    if not rows:
        raise CheckpointError(f"{runs_dir} holds no run yet: start one with `mpt train CONFIG`.")
    return rows[::-1]


def row_or_none(path: Path) -> RunRow | None:
    """Return a run's row; None if the folder was removed meanwhile or is none after all.

    Nor is a defect in reading one run, which is reported, a reason to show none of the others.
    """
    try:
        return describe(read_outline(path))
    except DataError:
        return None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        print(
            f"warning: {printable(str(path), 200)} could not be described ({printable(reason, 200)})",
            file=sys.stderr,
        )
        return None


def best_runs(rows: Iterable[RunRow]) -> set[Path]:
    """Return the finished runs with the best figure of their data set and metric, if there are rivals.

    A run counts by its best evaluation, whose weights `mpt infer` and `mpt convert` take.
    """
    groups: dict[tuple[str, str], list[RunRow]] = {}
    for row in rows:
        if row.is_finished and row.metric and math.isfinite(row.best):
            groups.setdefault((row.dataset, row.metric), []).append(row)
    found = set()
    for group in groups.values():
        if len(group) > 1:
            choose = max if group[0].higher_is_better else min
            top = choose(row.best for row in group)
            found |= {row.path for row in group if row.best == top}
    return found


def describe(record: RunRecord) -> RunRow:
    """Return a run's row of the table."""
    total = number(record.summary.get("total_steps"), 0.0)
    return RunRow(
        path=record.path,
        name=record.name,
        model=record.model,
        dataset=record.dataset,
        mode=record.mode,
        dtype=record.dtype,
        seed=record.seed,
        steps=record.steps,
        state="finished"
        if record.is_finished
        else f"{record.steps}" + (f" of {total:.0f}" if total > 0 else ""),
        is_finished=record.is_finished,
        metric=record.metric,
        higher_is_better=record.higher_is_better,
        final=record.final,
        best=record.best,
        peak_bytes=record.peak_bytes,
        step_seconds=record.step_seconds,
        samples_per_second=record.samples_per_second,
        skipped=sum(record.skipped.values()),
        given=given_settings(record.environment.get("command")),
        trained=time.strftime(
            "%Y-%m-%d %H:%M", time.localtime(max(writing_times(record.path), default=0) / 1e9)
        ),
    )


def given_settings(command: Any) -> str:
    """Return the overrides and patches of a command line, without the run's name."""
    words = [str(word) for word in command] if isinstance(command, list) else []
    found = []
    for before, word in zip(["", *words], words, strict=False):
        if before == "--with" or ("=" in word and not word.startswith(("-", "name="))):
            found.append(word)
    return " ".join(found)
