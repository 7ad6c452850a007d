"""`mpt list runs`: the runs of a folder, the last trained first, as lines or as JSON. Torch is not imported."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mpt.foreign.text import harmless
from mpt.report.run_rows import RunRow, best_runs, read_rows
from mpt.report.units import show_figure

HEADINGS = ("run", "trained", "steps", "model", "data", "precision", "result(*best)", "given")


def list_runs(runs_dir: Path, *, as_json: bool) -> None:
    """Print a line per run; a star marks the best finished run of its data set and metric.

    Raises CheckpointError if the folder has no run.
    """
    rows = read_rows(runs_dir)
    if as_json:
        print(json.dumps([as_data(row) for row in rows], indent=2))
        return
    best = best_runs(rows)
    lines = [HEADINGS, *(cells(row, row.path in best) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else max(map(len, shown))
    for line in shown:
        print(line if len(line) <= room else line[: max(1, room - 1)] + "…")


def cells(row: RunRow, is_best: bool) -> Sequence[str]:
    """Return a run's line."""
    state = str(row.steps) if row.is_finished else f"{row.state}, unfinished"
    result = f"{row.metric} {show_figure(row.final)}{best_of(row)}{' *' if is_best else ''}" if row.metric else ""
    return tuple(map(harmless, (row.name, row.trained, state, row.model, row.dataset, row.mode, result, row.given)))


def best_of(row: RunRow) -> str:
    """Return a run's best figure in brackets; nothing if its last one is the best."""
    return f" (best {show_figure(row.best)})" if math.isfinite(row.best) and row.best != row.final else ""


def as_data(row: RunRow) -> dict[str, object]:
    """Return a run as JSON can hold it: figures that are not there are null."""
    fields = {**dataclasses.asdict(row), "path": str(row.path)}
    figures = {name for name, value in fields.items() if isinstance(value, float)}
    return {name: None if name in figures and not math.isfinite(value) else value for name, value in fields.items()}
