"""`mpt report RUN`: write a run's report anew, from its files alone; `--all`: a page over all runs. Torch is not
imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import NewestRun, Runs
from mpt.errors import ConfigError
from mpt.report.run_page.figures import write_figures
from mpt.report.run_page.page import write_report
from mpt.report.runs.all_runs import write_all_runs
from mpt.run.records.layout import find_run, newest_run


@dataclass(frozen=True)
class Command:
    """Write a run's tables, plots and page anew.

    Examples:
      mpt report
      mpt report RUN --figures curves
      mpt report --all
    """

    run: NewestRun = None
    """A run."""
    all: bool = False
    """Write one page over all runs instead: index.html in their folder."""
    figures: Annotated[str | None, typer.Option(metavar="DIR")] = None
    """Write the curves into a folder too: CSV, and each plot as SVG and PDF."""
    runs: Runs = "runs"


def run(arguments: Command) -> None:
    """Write `report.md`, `.json` and `.html` into the named run, the newest one by default, or a page over all runs.

    Raises CheckpointError if there is no such run, InputOutputError if the report cannot be written, ConfigError for
    a run alongside `--all`.
    """
    runs = Path(arguments.runs)
    if arguments.all:
        if arguments.figures:
            raise ConfigError("--figures is of one run: name it, without --all.")
        if arguments.run:
            raise ConfigError(
                f"--all is a page over all runs in {runs}: leave out {arguments.run}, or give --runs."
            )
        print(write_all_runs(runs))
        return
    directory = find_run(arguments.run, runs)[0] if arguments.run else newest_run(runs)
    write_report(directory.path)
    for suffix in ("html", "md", "json"):
        print(directory.report_path(suffix))
    if arguments.figures:
        for path in write_figures(directory.path, Path(arguments.figures)):
            print(path)
