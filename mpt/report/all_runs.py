"""All runs of a folder as one page: a table to sort and filter, with the best run of each data set and metric.

The page lies in the folder of the runs and points to their reports and to the comparisons beside them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mpt.errors import CheckpointError, DataError
from mpt.report.page import environment
from mpt.report.read_run import RunRecord, number, read_run
from mpt.report.run_files import read_object
from mpt.run.files import write_atomically
from mpt.run.layout import list_runs, writing_times

PAGE = "index.html"


def write_all_runs(runs_dir: Path) -> Path:
    """Write `index.html` into a folder of runs and return its path.

    Raises CheckpointError if the folder has no run, InputOutputError if the page cannot be written.
    """
    records = [record for directory in list_runs(runs_dir) if (record := read_or_none(directory.path)) is not None]
    if not records:
        raise CheckpointError(f"{runs_dir} holds no run yet: start one with `mpt train CONFIG`.")
    records.reverse()
    best = best_runs(records)
    template = environment().get_template("all_runs.html.j2")
    page = template.render(
        folder=runs_dir.resolve().name,
        rows=[describe(record, record.path in best) for record in records],
        choices={key: sorted({getattr(one, key) for one in records} - {""}) for key in ("model", "dataset", "mode")},
        comparisons=read_comparisons(runs_dir),
    )
    write_atomically(runs_dir / PAGE, page)
    return runs_dir / PAGE


def read_or_none(path: Path) -> RunRecord | None:
    """Read a run; None where the folder was removed meanwhile or is none after all."""
    try:
        return read_run(path)
    except DataError:
        return None


def best_runs(records: Iterable[RunRecord]) -> set[Path]:
    """Return the finished runs with the best final figure of their data set and metric, where there are rivals."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        if record.is_finished and record.metric and math.isfinite(record.final):
            groups.setdefault((record.dataset, record.metric), []).append(record)
    found = set()
    for group in groups.values():
        if len(group) > 1:
            choose = max if group[0].higher_is_better else min
            top = choose(record.final for record in group)
            found |= {record.path for record in group if record.final == top}
    return found


def describe(record: RunRecord, is_best: bool) -> dict[str, Any]:
    """Return what the table shows of a run."""
    total = number(record.summary.get("total_steps"), 0.0)
    report = record.path / "report.html"
    return {
        "name": record.name,
        "link": f"{quote(record.name)}/report.html" if report.is_file() else "",
        "record": record,
        "is_best": is_best,
        "state": "finished" if record.is_finished else f"{record.steps}" + (f" of {total:.0f}" if total > 0 else ""),
        "skipped": sum(record.skipped.values()),
        "trained": time.strftime("%Y-%m-%d %H:%M", time.localtime(max(writing_times(record.path), default=0) / 1e9)),
    }


def read_comparisons(runs_dir: Path) -> Sequence[dict[str, str]]:
    """Return the comparisons in a folder of runs: name, link and verdicts, the newest first."""
    found = []
    for file in sorted(runs_dir.glob("*/comparison.json"), key=lambda path: -path.stat().st_mtime):
        problems: list[str] = []
        record = read_object(file, problems)
        modes = record.get("modes")
        verdicts = [
            f"{mode.get('mode')} {mode['verdict'].get('outcome')}"
            for mode in (modes if isinstance(modes, list) else [])
            if isinstance(mode, dict) and isinstance(mode.get("verdict"), dict)
        ]
        found.append(
            {
                "name": file.parent.name,
                "link": f"{quote(file.parent.name)}/comparison.html",
                "metric": str(record.get("metric", "")),
                "verdicts": ", ".join(verdicts) or "; ".join(problems),
            }
        )
    return found
