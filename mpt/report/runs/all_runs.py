"""All runs of a folder as one page: curves laid over each other, and a table to sort, filter and group.

The page lies in the folder of the runs and points to their reports and to the comparisons alongside them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from mpt.report.reading.run_files import read_object
from mpt.report.run_page.page import environment
from mpt.report.runs.run_overlay import MOST_DRAWN, as_script_data, read_overlay
from mpt.report.runs.run_rows import best_runs, read_rows
from mpt.run.process.files import write_atomically

PAGE = "index.html"


def write_all_runs(runs_dir: Path) -> Path:
    """Write `index.html` into a folder of runs and return its path.

    Raises CheckpointError if the folder has no run, InputOutputError if the page cannot be written.
    """
    rows = read_rows(runs_dir)
    overlay = read_overlay(rows)
    template = environment().get_template("all_runs.html.j2")
    page = template.render(
        folder=runs_dir.resolve().name,
        rows=rows,
        overlay=overlay,
        overlay_data=Markup(as_script_data(overlay)),
        most_drawn=MOST_DRAWN,
        best=best_runs(rows),
        choices={
            key: sorted({getattr(one, key) for one in rows} - {""})
            for key in ("model", "dataset", "mode")
        },
        comparisons=read_comparisons(runs_dir),
    )
    write_atomically(runs_dir / PAGE, page)
    return runs_dir / PAGE


def read_comparisons(runs_dir: Path) -> Sequence[dict[str, str]]:
    """Return the comparisons in a folder of runs: name, link and verdicts, the newest first."""
    found = []
    for file in sorted(runs_dir.glob("*/comparison.json"), key=lambda path: -path.stat().st_mtime):
        problems: list[str] = []
        record = read_object(file, problems)
        modes = record.get("modes")
        verdicts = [
            f"{mode.get('mode')}: {mode['verdict'].get('headline') or mode['verdict'].get('outcome')}"
            for mode in (modes if isinstance(modes, list) else [])
            if isinstance(mode, dict) and isinstance(mode.get("verdict"), dict)
        ]
        found.append(
            {
                "name": file.parent.name,
                "link": f"{quote(os.fsencode(file.parent.name))}/comparison.html",
                "metric": str(record.get("metric", "")),
                "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(file.stat().st_mtime)),
                "verdicts": "; ".join(verdicts) or "; ".join(problems),
            }
        )
    return found
