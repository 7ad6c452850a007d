"""A run's files at its end, and whether they were written of the step the run is at.

The last checkpoint comes first, then `summary.json`, then the report, whose `report.json` is written last and so says
that the other two are there. A kill in between, or an extension of a finished run, leaves files of an earlier end:
the step that they name distinguishes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpt.errors import CheckpointError
from mpt.foreign.files import read_json
from mpt.run.records.layout import RunDirectory, list_runs, newest_run


def read_json_object(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if there is none, or it is damaged, or the file is a link or no regular file."""
    try:
        if path.is_symlink():
            return {}
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def has_summary_of(run: RunDirectory, step: int) -> bool:
    """Is there a whole summary of this step?"""
    return bool(read_json_object(run.summary_path).get("steps") == step)


def newest_finished_run(runs_dir: Path) -> tuple[RunDirectory, str | None]:
    """Return the newest run that was trained to its end, and a warning if a newer one was not.

    Without any, the newest run with a checkpoint. Raises CheckpointError if there is none.
    """
    runs = list_runs(runs_dir)
    finished = [run for run in runs if read_json_object(run.summary_path).get("steps")]
    trained = finished if finished else [run for run in runs if any(run.checkpoints.glob("step-*"))]
    if not trained:
        if runs:
            raise CheckpointError(
                f"No run in {runs_dir} has a checkpoint yet; the newest is {runs[-1].path}."
            )
        return newest_run(runs_dir), None
    chosen = trained[-1]
    if not finished:
        return (
            chosen,
            f"no run in {runs_dir} is finished; {chosen.path}, the newest with a checkpoint, is taken",
        )
    if chosen.path != runs[-1].path:
        return chosen, f"{runs[-1].path} is newer and not finished; {chosen.path} is taken"
    return chosen, None


def has_report_of(run: RunDirectory, step: int) -> bool:
    """Is there a whole report of a run that ended at this step?"""
    report = read_json_object(run.report_path("json"))
    pages = all(run.report_path(suffix).is_file() for suffix in ("html", "md"))
    return pages and report.get("steps") == step and report.get("finished") is True
