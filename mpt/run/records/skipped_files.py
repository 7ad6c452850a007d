"""The bad files of a data set that a run has skipped: a table in its folder, `path` and `reason`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from mpt.foreign.files import LARGEST_RECORD_BYTES, read_text
from mpt.foreign.text import csv_cell, from_csv_cell
from mpt.run.process.files import write_atomically
from mpt.run.records.layout import RunDirectory


def write_skipped_files(run: RunDirectory, found: Mapping[str, str]) -> int:
    """Add files to the run's table, which a resume continues; return how many it holds. Without any there is none."""
    known: dict[str, str] = {}
    if run.skipped_files_path.is_file():
        text = read_text(run.skipped_files_path, LARGEST_RECORD_BYTES, "surrogateescape")
        known = {
            from_csv_cell(row[0]): from_csv_cell(row[1])
            for row in list(csv.reader(io.StringIO(text)))[1:]
            if len(row) == 2
        }
    every = {**known, **found}
    if every and every != known:
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["path", "reason"])
        writer.writerows([csv_cell(cell) for cell in row] for row in sorted(every.items()))
        write_atomically(
            run.skipped_files_path, table.getvalue().encode("utf-8", "surrogateescape")
        )
    return len(every)
