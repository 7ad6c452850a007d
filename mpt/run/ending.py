"""What a run writes at its end, and whether that was written of the step the run is at.

The last checkpoint comes first, then `summary.json`, then the report, whose `report.json` is written last and so says
that the other two are there. A kill in between, or an extension of a finished run, leaves files of an earlier end:
they are told apart by the step that they name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpt.run.files import open_regular
from mpt.run.layout import RunDirectory

LARGEST_BYTES = 1 << 28


def read_json_object(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty where there is none, or it is damaged, or the file is a link or no regular file."""
    try:
        with open(open_regular(path), "rb") as file:
            value = json.loads(file.read(LARGEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def has_summary_of(run: RunDirectory, step: int) -> bool:
    """Is there a whole summary of this step?"""
    return bool(read_json_object(run.summary_path).get("steps") == step)


def has_report_of(run: RunDirectory, step: int) -> bool:
    """Is there a whole report of a run that ended at this step?"""
    report = read_json_object(run.report_path("json"))
    pages = all(run.report_path(suffix).is_file() for suffix in ("html", "md"))
    return pages and report.get("steps") == step and report.get("finished") is True
