"""One finished, running or broken run, read from its files alone.

A report must be possible anywhere and above all for a run that went wrong: no torch, no training code, and every file
may be missing or end in half a line. Files that could not be read are kept as a list of sentences that the report
prints. A run that was resumed from an earlier checkpoint, or rolled back, holds some steps twice: the
later line is the one that happened in the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpt.errors import DataError
from mpt.report.reading.log_values import number, section, whole
from mpt.report.reading.run_files import (
    parse_config,
    read_last_lines,
    read_lines,
    read_object,
    read_text,
)
from mpt.report.reading.run_record import RunRecord
from mpt.run.records.layout import CHECKPOINT_NAME

MARKS = ("config.yaml", "metrics.jsonl", "summary.json")
"""A folder with one of these is a run."""

MOST_LINES = 10_000
"""The most lines of a log that are read; of more, evenly chosen ones: no plot shows as many."""
MOST_OUTLINED = 100
"""The same for a row in a table of runs."""
LASTING = ("metric", "higher_is_better", "precision", "parameters")
"""Entries of a summary of an earlier step that still hold for the run."""


def read_run(path: Path) -> RunRecord:
    """Read a run directory. Raises DataError if it is none; damaged files become `problems`."""
    check_run(path)
    problems: list[str] = []
    text = read_text(path / "config.yaml", problems)
    lines = read_lines(path / "metrics.jsonl", problems, MOST_LINES)
    config = parse_config(text, problems)
    summary, goes_on = current_summary(path, config, lines, problems)
    return RunRecord(
        path=path,
        config_text=text,
        config=config,
        environment=read_object(path / "env.json", problems),
        train=last_of_each_step([line for line in lines if line.get("kind") == "train"]),
        evaluations=last_of_each_step([line for line in lines if line.get("kind") == "evaluate"]),
        events=read_lines(path / "events.jsonl", problems),
        summary=summary,
        goes_on=goes_on,
        plan=read_object(path / "plan.json", problems, needed=False),
        samples=tuple(sorted(file for file in (path / "samples").glob("*.png") if file.is_file())),
        problems=problems,
    )


def read_outline(path: Path) -> RunRecord:
    """Read the parts of a run for a row in a table of many: its settings, its summary and the end of its log.

    The log of a run without a summary that holds is read whole, a few of its lines kept. Raises DataError
    as `read_run`.
    """
    check_run(path)
    problems: list[str] = []
    config = parse_config(read_text(path / "config.yaml", problems), problems)
    lines: Sequence[Mapping[str, Any]] = read_last_lines(path / "metrics.jsonl")
    summary, goes_on = current_summary(path, config, lines, problems)
    if goes_on or not summary:
        lines = read_lines(path / "metrics.jsonl", problems, MOST_OUTLINED)
    return RunRecord(
        path=path,
        config=config,
        environment=read_object(path / "env.json", problems, needed=False),
        train=last_of_each_step([line for line in lines if line.get("kind") == "train"]),
        evaluations=last_of_each_step([line for line in lines if line.get("kind") == "evaluate"]),
        summary=summary,
        goes_on=goes_on,
        problems=problems,
    )


def check_run(path: Path) -> None:
    """Raise DataError for a folder that is no run."""
    if not path.is_dir():
        raise DataError(f"{path}: there is no such run directory.")
    if not any((path / mark).is_file() for mark in MARKS):
        raise DataError(f"{path} is not a run directory: it holds none of {', '.join(MARKS)}.")


def current_summary(
    path: Path, config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], problems: list[str]
) -> tuple[Mapping[str, Any], bool]:
    """Return the part of the summary that still holds, and whether the run continued since.

    A run that was extended and killed has the summary of its earlier end. Then lines or a checkpoint are of a later
    step, or the configuration asks for more steps than there were to be; of its figures only those stay that do not
    change.
    """
    summary = read_object(path / "summary.json", problems, needed=False)
    steps = number(summary.get("steps"))
    if not math.isfinite(steps):
        return summary, False
    names = (
        CHECKPOINT_NAME.fullmatch(entry.name) for entry in (path / "checkpoints").glob("step-*")
    )
    saved = max((int(name.group(1)) for name in names if name), default=-1)
    reached = max([saved, *(whole(line.get("step"), -1) for line in lines)])
    if reached <= steps:
        asked = number(section(config, "train").get("steps"))
        wanted = whole(summary.get("total_steps"), 0)
        return summary, asked > max(steps, wanted) and not summary.get("stopped_early")
    problems.append(
        f"summary.json is of step {steps:.0f} and the run has gone on to step {reached}: its figures are left out."
    )
    return {key: summary[key] for key in LASTING if key in summary}, True


def last_of_each_step(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Keep the last line of every step, in the order of steps."""
    kept = {whole(line.get("step"), -1): line for line in lines}
    return [{**kept[step], "step": step} for step in sorted(kept) if step >= 0]
