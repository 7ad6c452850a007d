"""A run's curves for a paper: numbers as CSV, plots as SVG and PDF, in black on white."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpt.report.drawing import kept_plots, save_plot
from mpt.report.reading.log_values import number, whole
from mpt.report.reading.read_run import read_run
from mpt.report.run_page.plots import draw_run
from mpt.run.process.files import failures_explained, write_atomically

SUFFIXES = ("svg", "pdf")


def write_figures(run_path: Path, folder: Path) -> list[Path]:
    """Write `train.csv`, `evaluations.csv` and every plot of a run below a folder; return the files.

    Raises DataError if `run_path` is no run, InputOutputError if a file cannot be written.
    """
    record = read_run(run_path)
    with failures_explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, lines in (("train", record.train), ("evaluations", record.evaluations)):
        if lines:
            written.append(folder / f"{name}.csv")
            write_atomically(written[-1], as_csv(lines))
    with kept_plots() as plots:
        names = list(draw_run(record))
    for name, plot in zip(names, plots, strict=True):
        for suffix in SUFFIXES:
            written.append(folder / f"{name}.{suffix}")
            write_atomically(written[-1], save_plot(plot, suffix))
    return written


def as_csv(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return log lines as a table: a column for the step and one for each number, `losses/net/loss`."""
    rows = [dict(flat(line)) for line in lines]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *names])
    for line, row in zip(lines, rows, strict=True):
        writer.writerow([whole(line.get("step")), *(row.get(name, "") for name in names)])
    return text.getvalue()


def flat(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Return the numbers of a nested mapping by their path."""
    found: list[tuple[str, float]] = []
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            found += flat(value, f"{prefix}{name}/")
        elif not math.isnan(number(value)) or value == "NaN":
            found.append((f"{prefix}{name}".lstrip("=+-@"), number(value)))
    return found
