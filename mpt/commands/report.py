"""`mpt report RUN`: write a run's report anew, from its files alone. Torch is not imported."""

from __future__ import annotations

from pathlib import Path

from mpt.commands.arguments import ReportArguments
from mpt.report.page import write_report
from mpt.run.layout import find_run, newest_run


def run(arguments: ReportArguments) -> None:
    """Write `report.md`, `.json` and `.html` into the named run, the newest one by default.

    Raises CheckpointError if there is no such run, InputOutputError if the report cannot be written.
    """
    runs = Path(arguments.runs)
    directory = find_run(arguments.run, runs)[0] if arguments.run else newest_run(runs)
    write_report(directory.path)
    for suffix in ("html", "md", "json"):
        print(directory.report_path(suffix))
