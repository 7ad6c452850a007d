"""The bad files of a data set that a run has skipped: a table in its folder, `path` and `reason`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from mpt.run.files import write_atomically
from mpt.run.layout import RunDirectory


def write_skipped_files(run: RunDirectory, found: Mapping[str, str]) -> int:
    """Add files to the run's table, which a resume continues; return how many it holds. Without any there is none."""
    known: dict[str, str] = {}
    if run.skipped_files_path.is_file():
        text = run.skipped_files_path.read_text("utf-8", errors="surrogateescape")
        known = {row[0]: row[1] for row in list(csv.reader(io.StringIO(text)))[1:] if len(row) == 2}
    every = {**known, **found}
    if every and every != known:
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["path", "reason"])
        writer.writerows(sorted(every.items()))
        write_atomically(run.skipped_files_path, table.getvalue().encode("utf-8", "surrogateescape"))
    return len(every)
