"""`mpt plan lock CONFIG` keeps a plan in a file (`mpt.workflows.plan_lock`), for `mpt plan check FILE`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Card, PlannedConfig
from mpt.config.sizes import describe_bytes
from mpt.planner.facts.gpus import DEFAULT
from mpt.report.units import show_seconds
from mpt.run.process.files import refuse_unwritable
from mpt.workflows.plan_lock import Lock, plan_again, write_lock


@dataclass(frozen=True)
class Command(PlannedConfig):
    """Keep the plan of CONFIG in a file for mpt plan check.

    A script or function of your own will do too: `mpt plan lock train.py -- ITS WORDS`.

    Examples:
      mpt plan lock mine.yaml --gpu rtx3060 -o plan.lock
    """

    gpu: Card = None
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE")] = "plan.lock"
    """The file to write."""


def run(arguments: Command) -> None:
    path, patches = Path(arguments.output), tuple(str(patch) for patch in arguments.patches)
    refuse_unwritable(path)
    asked = Lock(
        str(arguments.config), tuple(arguments.overrides), patches, arguments.gpu or DEFAULT
    )
    lock = plan_again(asked, arguments.allow)
    write_lock(lock, path)
    print(
        f"{path}: peak {describe_bytes(lock.peak_bytes)}, step {show_seconds(lock.step_seconds)} on {lock.gpu}"
    )
