"""`mpt plan`: the memory and time of a configuration on a GPU that need not be there, and the fastest recipe that fits
a budget.

Torch is not imported here: plans are made in processes of their own (`mpt.planner.client.session`).
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mpt.commands.cli.arguments import (
    AllowLossy,
    Card,
    Desktop,
    Network,
    Output,
    PerMachine,
    PlannedConfig,
    PlannedFile,
    Strategy,
)
from mpt.commands.cli.command_line import spell
from mpt.commands.cli.console import open_console
from mpt.commands.planning.plan_config import (
    choose_output,
    common_words,
    load_planned,
    progress,
    sharded,
    write_patch,
)
from mpt.commands.planning.plan_tables import print_plan, print_search
from mpt.config.schema import Config
from mpt.config.sizes import describe_bytes
from mpt.errors import ConfigError, MayFitError, MemoryBudgetError
from mpt.planner.answers.plan import Plan
from mpt.planner.facts.verdict import judge
from mpt.planner.recipes.patch_origin import describe_origin, find_other_cards
from mpt.planner.recipes.planned import Planned, find_placement, make_plan
from mpt.planner.recipes.printed import as_data
from mpt.planner.recipes.recipe import (
    EXPLANATIONS,
    Recipe,
    describe_cost,
    describe_patch,
    without_conflicts,
    worth_showing,
)
from mpt.planner.recipes.words import (
    describe_band,
    describe_largest,
    describe_too_large,
    headline,
    nothing_fits,
)
from mpt.planner.trace.timeline import write_timeline
from mpt.report.units import show_seconds


@dataclass(frozen=True)
class Command(PlannedConfig):
    """Predict peak memory without a GPU; find settings that fit.

    Plans one training of CONFIG; with --vram, the fastest recipe that fits is searched and written. Sub-commands:
    infer, presets, tune, calibrate, lock, check, cluster; `mpt plan infer -h` explains one.

    A training script of your own is planned as it stands: `mpt plan train.py -- ITS WORDS` (`mpt plan step -h`).

    Examples:
      mpt plan mine.yaml --vram 6GiB --gpu rtx2060
      mpt plan mine.yaml train.batch_size=64 --gpu rtx3060
      mpt plan mine.yaml --gpu rtx3060 --largest
      mpt plan train.py --gpu rtx3060 -- --batch-size 32
    """

    config: PlannedFile
    vram: Annotated[str | None, typer.Option(metavar="SIZE")] = None
    """The memory to fit into, such as 6GiB; without it the configuration is planned as it is."""
    gpu: Card = None
    output: Output = None
    """The file of the recipe, by default plan.yaml."""
    times_from: Annotated[str | None, typer.Option(metavar="CARD")] = None
    """Take the step time's factor of another calibrated card, moved by both cards' rooflines."""
    desktop: Desktop = None
    allow_lossy: AllowLossy = False
    gate: bool = False
    """Exit with 10 if it only may fit, and with 7 if CONFIG does not fit a card without --vram."""
    largest: bool = False
    """Find the largest batch that fits too: of CONFIG, or of the first recipe."""
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N")] = None
    """Plan for N processes with a card each; train.batch_size is the batch of all of them."""
    strategy: Strategy = None
    network: Network = None
    per_machine: PerMachine = None
    snapshot: Annotated[str | None, typer.Option(metavar="FILE")] = None
    """Write the planned timeline of CONFIG unchanged as a memory snapshot of torch, for pytorch.org/memory_viz."""
    verbose: bool = False
    """Print the memory by kind and by module."""


PICTURED = 3


def run(arguments: Command) -> None:
    """Print a plan, search a recipe if there is a budget, or learn from a run.

    Raises MemoryBudgetError (exit 7) when nothing fits, ConfigError for an unknown GPU, budget or configuration.
    """
    check_options(arguments)
    path = choose_output(arguments, arguments.output, "plan", is_written=arguments.vram is not None)
    config = load_planned(arguments, *sharded(arguments.strategy))
    planned = plan_config(config, arguments)
    warn_of_patches_for_other_cards(planned, arguments)
    written: list[str] = []
    if planned.best is not None and planned.best.patch:
        written = write_results(path, arguments, planned)
    if arguments.json:
        found = as_data(planned.gpu, planned.calibration, planned.plan, planned.found, written)
        print(json.dumps(found, indent=1))
    else:
        show(open_console(), planned, arguments)
        if written:
            command = train_command(arguments, path, planned.found.recipes[0])
            open_console().print(f"wrote {' and '.join(written)}; train the first recipe with")
            print(f"  {command}")
    if arguments.vram and planned.best is None:
        raise MemoryBudgetError(
            nothing_fits(planned.found.recipes, planned.budget, arguments.allow_lossy)
        )
    if arguments.gate:
        pass_gate(planned.plan if planned.best is None else planned.best.plan)


def check_options(arguments: Command) -> None:
    """Raise ConfigError for options that go with another one that is not there."""
    if arguments.output is not None and arguments.vram is None:
        raise ConfigError(
            "--output: a recipe is searched and written with a budget only; add --vram, such as 6GiB"
        )
    if arguments.gate and not (arguments.vram or arguments.gpu):
        raise ConfigError("--gate: there is nothing to fit into; add --gpu or --vram")


def plan_config(config: Config, arguments: Command) -> Planned:
    """Plan a configuration as the options say, with how far a search is on the terminal."""
    placement = find_placement(
        config, arguments.nproc, arguments.strategy, arguments.network, arguments.per_machine
    )
    with progress() as told:
        return make_plan(
            config,
            vram=arguments.vram,
            gpu=arguments.gpu,
            desktop=arguments.desktop,
            times_from=arguments.times_from,
            placement=placement,
            largest=arguments.largest,
            allow_lossy=arguments.allow_lossy,
            snapshot=Path(arguments.snapshot) if arguments.snapshot else None,
            on_answer=told,
        )


def warn_of_patches_for_other_cards(planned: Planned, arguments: Command) -> None:
    """Say on standard error which patches were made for another card, if one is named here."""
    if arguments.gpu is not None and planned.capacity.budget_bytes is not None:
        for warning in find_other_cards(arguments.patches, planned.gpu.name, planned.budget):
            print(f"warning: {warning}", file=sys.stderr)


def show(console: Console, planned: Planned, arguments: Command) -> None:
    """Print the answer in one sentence, and the details."""
    plan, best, recipes = planned.plan, planned.best, planned.found.recipes
    console.print(headline(planned.config.heading, planned.gpu, plan, recipes), style="bold")
    for statement in planned.capacity.statements:
        console.print(statement)
    for sentence in describe_too_large(plan, planned.room):
        console.print(sentence)
    if arguments.verbose or not arguments.vram:
        print_plan(
            console,
            planned.config.heading,
            planned.gpu,
            planned.calibration,
            plan,
            arguments.verbose,
        )
    if recipes and (best is None or best.patch):
        print_search(console, planned.found, plan)
    if best is not None and best.patch and best.plan.largest_batch is not None:
        console.print(f"largest batch of the first recipe: {' '.join(describe_largest(best.plan))}")
    if arguments.snapshot is not None:
        console.print(f"wrote {arguments.snapshot}, for https://pytorch.org/memory_viz")


def pass_gate(plan: Plan) -> None:
    """Raise MayFitError (exit 10) or MemoryBudgetError (exit 7) unless a plan fits its budget."""
    found, budget = judge(plan), describe_bytes(plan.budget)
    assert found is not None
    if found.kind == "does not fit":
        raise MemoryBudgetError(f"does not fit in {budget}")
    if found.kind == "may fit":
        raise MayFitError(
            f"may fit in {budget}: {found.likely}{', by emptying the cache' * plan.tight}"
        )


def write_results(path: Path, arguments: Command, planned: Planned) -> list[str]:
    """Write the first recipe as a patch, and a picture of the first few alongside it; return their paths."""
    config, gpu, plan, budget = planned.config, planned.gpu, planned.plan, planned.budget
    recipes = planned.found.recipes
    best = recipes[0]
    heading = [
        train_command(arguments, path, best),
        "",
        f"{described(best)}: {describe_bytes(best.total)} of {describe_bytes(budget)},",
        f"{show_seconds(best.plan.step_seconds)} a step ({describe_band(best.plan.time_band)}), predicted by",
        plan_command(arguments),
        *([f"lossy: {EXPLANATIONS['lossy']}"] if best.is_lossy else []),
    ]
    write_patch(path, best.patch, heading, describe_origin(config, gpu.name, budget))
    panels = [(f"as it stands: {describe_bytes(plan.total)}", plan.timeline)]
    shown = [one for one in worth_showing(recipes)[:PICTURED] if one.patch]
    panels += [
        (f"{described(one)}: {describe_bytes(one.total)}", one.plan.timeline) for one in shown
    ]
    picture = path.with_suffix(".png")
    title = (
        f"{config.heading}, batch {plan.batch_size}, on {gpu.name} with {describe_bytes(budget)}"
    )
    write_timeline(picture, panels, budget - plan.context_bytes, title)
    return [str(path), str(picture)]


def described(recipe: Recipe) -> str:
    """Return a recipe and its cost, as the patch and the picture name it."""
    return f"{describe_patch(recipe.patch)} ({describe_cost(recipe)})"


def train_command(arguments: Command, path: Path, best: Recipe) -> str:
    """Return the command that trains a recipe whose patch is at `path`."""
    overrides = without_conflicts(arguments.overrides, best.patch)
    return shlex.join(["mpt", "train", *common_words(arguments, overrides), "--with", str(path)])


def plan_command(arguments: Command) -> str:
    """Return the command that was given, but for its output options."""
    printed = ("json", "verbose", "gate", "snapshot")
    names = [field.name for field in dataclasses.fields(arguments) if field.name not in printed]
    return shlex.join(["mpt", "plan", *spell(arguments, names)])
