"""`mpt plan step FACTORY`, or `mpt plan FACTORY`: a training step, or a whole script, that knows nothing of mpt."""

from __future__ import annotations

import json
import string
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mpt.commands.cli.arguments import Allow, Card, Desktop, Json
from mpt.commands.cli.console import columns, open_console
from mpt.commands.planning.plan_tables import print_plan
from mpt.config.sizes import describe_bytes
from mpt.errors import MemoryBudgetError
from mpt.planner.answers.edits import INDENT
from mpt.planner.answers.own_plan import ORDER, Way
from mpt.planner.facts.verdict import judge
from mpt.planner.recipes.own_step import OwnPlanned, arguments_of, plan_own_step
from mpt.planner.recipes.words import headline
from mpt.report.units import show_seconds


@dataclass(frozen=True)
class Command:
    """Plan a training script or step of your own, which need not know mpt, and the changes to write into it.

    FACTORY is a function, as FILE.py:NAME or PACKAGE.MODULE:NAME, that returns the step, or (model, optimizer, batch,
    step); or a training script, FILE.py, whose own options follow after --. `mpt plan FACTORY` does the same.

    Examples:
      mpt plan train.py --gpu rtx3060 -- --batch-size 32
      mpt plan my_training.py:build batch_size=32 --vram 8GiB --largest
    """

    factory: Annotated[str, typer.Argument(metavar="FACTORY", show_default=False)]
    """A function by its file or module, or a script."""
    overrides: Annotated[
        tuple[str, ...], typer.Argument(metavar="[NAME=VALUE]...", show_default=False)
    ] = ()
    """Arguments for it, or a script's command line; with a batch size among them --largest can vary it."""
    vram: Annotated[str | None, typer.Option(metavar="SIZE")] = None
    """The memory to fit into, such as 6GiB."""
    gpu: Card = None
    desktop: Desktop = None
    largest: bool = False
    """Find the largest batch_size that fits."""
    snapshot: Annotated[str | None, typer.Option(metavar="FILE")] = None
    """Write the planned timeline as a memory snapshot of torch, for pytorch.org/memory_viz."""
    allow: Allow = ()
    json: Json = False


def run(arguments: Command) -> None:
    """Plan a step and print its memory and time, and the changes to the script.

    Raises MemoryBudgetError if neither it nor any way fits.
    """
    planned = plan_own_step(
        arguments.factory,
        **arguments_of(arguments.factory, arguments.overrides),
        allow=arguments.allow,
        vram=arguments.vram,
        gpu=arguments.gpu,
        desktop=arguments.desktop,
        largest=arguments.largest,
        snapshot=Path(arguments.snapshot) if arguments.snapshot else None,
    )
    if arguments.json:
        print(json.dumps(as_data(planned), indent=1))
    else:
        show(open_console(), planned, arguments)
    if planned.plan.fits is False and not any(way.plan.fits for way in planned.ways):
        can_shrink = planned.plan.batch_size and not arguments.largest
        smaller = "; --largest looks for a smaller batch that does" if can_shrink else ""
        raise MemoryBudgetError(
            f"nothing that was tried fits in {describe_bytes(planned.plan.budget)}{smaller}"
        )


def as_data(planned: OwnPlanned) -> dict[str, Any]:
    return {
        "gpu": asdict(planned.gpu),
        "calibration": asdict(planned.calibration),
        **planned.found.as_data(),
    }


def show(console: Console, planned: OwnPlanned, arguments: Command) -> None:
    """Print the sentence, the details, and the ways."""
    plan = planned.plan
    name = planned.found.name
    console.print(headline(name, planned.gpu, plan, []), style="bold")
    for statement in planned.capacity.statements:
        console.print(statement)
    print_plan(console, name, planned.gpu, planned.calibration, plan, is_verbose=True)
    if plan.growing and plan.fits is False and plan.growing.fits:
        console.print(
            "it fits as it stands with PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"
        )
    if planned.ways:
        print_ways(console, planned.ways)
    if arguments.snapshot is not None:
        console.print(f"wrote {arguments.snapshot}, for https://pytorch.org/memory_viz")


def print_ways(console: Console, ways: list[Way]) -> None:
    """Print a row for each way, and the places and lines of the changes that its letters represent."""
    console.print("\nwith a change to the script", style="bold")
    found = {one for way in ways for one in way.changes}
    changes = sorted(found, key=lambda one: (ORDER[one[0]], one[1]))
    letters = dict(zip(changes, string.ascii_uppercase, strict=False))
    table = columns("", ">memory", ">chance", ">step", "")
    for way in ways:
        judged = judge(way.plan)
        chance = f"{judged.percent} %" if judged else ""
        rounded = "changes rounding: compare the results"
        kept = way.note or ("the same result, to rounding" if way.exact else rounded)
        change = " + ".join(sorted(letters[one] for one in way.changes))
        table.add_row(
            change,
            describe_bytes(way.plan.total),
            chance,
            show_seconds(way.plan.step_seconds),
            kept,
        )
    console.print(table)
    for (_, places), letter in letters.items():
        for number, (place, lines) in enumerate(places):
            mark = " " if number else letter
            console.print(f"{mark}  {place}", style="bold", soft_wrap=True, highlight=False)
            for line in lines:
                console.print(f"{INDENT}{line}", soft_wrap=True, markup=False)
