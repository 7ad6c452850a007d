"""`mpt plan cluster CONFIG`: many cards, as `--scaling` from one to thousands or as the cheapest set of `--cards`."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mpt.commands.cli.arguments import (
    AllowLossy,
    Card,
    Desktop,
    Network,
    PerMachine,
    PlannedConfig,
    Strategy,
)
from mpt.commands.cli.command_line import given
from mpt.commands.cli.console import columns, open_console
from mpt.commands.planning.plan_config import common_words, load_planned, progress, sharded
from mpt.commands.planning.plan_tables import print_scaling
from mpt.config.checking.layers import write_override
from mpt.config.differences import flatten
from mpt.config.schema import Config
from mpt.config.sizes import describe_bytes
from mpt.errors import ConfigError, MemoryBudgetError
from mpt.planner.client.processes import count_workers
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import load_calibration
from mpt.planner.facts.capacity import find_capacity
from mpt.planner.facts.placement import ON_MACHINE, Placement, check_placement
from mpt.planner.recipes import cheapest, scaling
from mpt.planner.recipes.cheapest import Candidate, Cheapest, find_cheapest, parse_offers
from mpt.planner.recipes.planned import choose_gpu
from mpt.planner.recipes.recipe import without_conflicts
from mpt.report.units import show_seconds
from mpt.run.process.files import free_path


@dataclass(frozen=True)
class Command(PlannedConfig):
    """Plan many cards: from one to thousands, or the cheapest set that trains CONFIG.

    Examples:
      mpt plan cluster mine.yaml --gpu h100 --scaling weak
      mpt plan cluster mine.yaml --cards rtx3090:4@0.3 --cards h100:8@2
    """

    scaling: Annotated[str | None, typer.Option(metavar="weak|strong")] = None
    """From 1 to --nproc cards, as table and picture: with the batch per card kept (weak), or of all."""
    cards: Annotated[tuple[str, ...], typer.Option("--cards", metavar="NAME:COUNT@PRICE")] = ()
    """Find the cheapest set of these cards that trains CONFIG, such as rtx3090:4@0.3; once for each kind of card."""
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N", show_default="4096")] = None
    """With --scaling: the most cards."""
    strategy: Strategy = None
    network: Network = None
    per_machine: PerMachine = None
    vram: Annotated[str | None, typer.Option(metavar="SIZE")] = None
    """With --scaling: the memory of a card that may be used."""
    gpu: Card = None
    desktop: Desktop = None
    allow_lossy: AllowLossy = False


OF_SCALING = ("vram", "gpu", "desktop", "nproc", "strategy", "scaling")
"""Options that --cards finds answers to alone."""


def run(arguments: Command) -> None:
    """Print the plan. Raises ConfigError if the subject is missing, MemoryBudgetError for no set."""
    if arguments.cards:
        for option in given(arguments, OF_SCALING):
            raise ConfigError(
                f"{option}: --cards names the cards and finds how many and how; leave it out"
            )
        show_cheapest(load_planned(arguments), arguments)
        return
    if arguments.scaling is None:
        raise ConfigError(
            "mpt plan cluster: add --scaling weak or strong, or --cards NAME:COUNT@PRICE"
        )
    if arguments.allow_lossy:
        raise ConfigError("--allow-lossy: no recipes are searched with --scaling; leave it out")
    show_scaling(load_planned(arguments, *sharded(arguments.strategy)), arguments)


def show_scaling(config: Config, arguments: Command) -> None:
    """Plan from one card to many, and print and draw them."""
    gpu = choose_gpu(arguments.gpu)
    capacity = find_capacity(gpu, arguments.gpu is not None, arguments.vram, arguments.desktop)
    base = Placement(
        arguments.nproc or scaling.LARGEST,
        network=arguments.network,
        per_machine=arguments.per_machine or ON_MACHINE,
    )
    check_placement(replace(base, strategy=arguments.strategy or base.strategy))
    cluster = base.cluster(gpu)
    picture = free_path(Path("scaling.png"))
    with Session(gpu, load_calibration(gpu.name), config.granted, count_workers()) as session:
        found = scaling.plan_scaling(
            session, config, str(arguments.scaling), base, arguments.strategy, capacity.budget_bytes
        )
    title = f"{config.heading} on {gpu.name}, {arguments.scaling} scaling, {cluster.link} and {cluster.network}"
    scaling.write_picture(picture, found, title, capacity.budget_bytes)
    if arguments.json:
        print(
            json.dumps(
                {**scaling.as_data(found), "gpu": asdict(gpu), "written": [str(picture)]}, indent=1
            )
        )
        return
    console = open_console()
    for statement in capacity.statements:
        console.print(statement)
    print_scaling(console, found, title)
    console.print(f"wrote {picture}")


def show_cheapest(config: Config, arguments: Command) -> None:
    """Search and print. Raises MemoryBudgetError if no set of the cards is enough."""
    with progress() as told:
        found = find_cheapest(
            config,
            parse_offers(arguments.cards),
            network=arguments.network,
            per_machine=arguments.per_machine or ON_MACHINE,
            allow_lossy=arguments.allow_lossy,
            workers=count_workers(),
            on_answer=told,
        )
    if arguments.json:
        command = {"command": command_for(found.best, arguments)} if found.best is not None else {}
        print(json.dumps(cheapest.as_data(found, **command), indent=1))
    else:
        print_cheapest(open_console(), found, config, arguments)
    if found.best is None:
        raise MemoryBudgetError(
            "no set of these cards trains this; use more of them, or a smaller train.batch_size"
        )


def print_cheapest(console: Console, found: Cheapest, config: Config, arguments: Command) -> None:
    """Print the plan, cheapest first, and the command for the answer."""
    table = columns(">price", "cards", "", ">memory", "fits", ">step", ">samples/s")
    for one in found.candidates:
        cards = f"{one.nproc} x {one.gpu.name}"
        if one.error:
            table.add_row(
                f"{one.price:g}", cards, one.words, "", one.error.split(": ", 1)[-1][:60], "", ""
            )
            continue
        seconds = one.plan.step_seconds
        table.add_row(
            f"{one.price:g}",
            cards,
            one.words,
            describe_bytes(one.plan.total),
            "yes" if one.fits else "close" if one.plan.fits else "no",
            show_seconds(seconds),
            f"{config.train.batch_size / seconds:,.0f}",
        )
    console.print(
        f"{config.heading}, batch {config.train.batch_size} of all cards together", style="bold"
    )
    console.print(table)
    best = found.best
    if best is not None:
        console.print(
            f"the cheapest set that trains this: {best.nproc} x {best.gpu.name}, {best.words}",
            style="bold",
        )
        console.print(f"  {command_for(best, arguments)}", soft_wrap=True)


def command_for(best: Candidate, arguments: Command) -> str:
    """Return the command that starts the training on a set of cards; of several machines, on each of them."""
    settings = [write_override(key, value) for key, value in flatten(best.settings).items()]
    words = common_words(
        arguments, [*without_conflicts(arguments.overrides, best.settings), *settings]
    )
    if best.nproc == 1:
        return shlex.join(["mpt", "train", *words])
    on_machine = arguments.per_machine or ON_MACHINE
    if best.nproc <= on_machine:
        return shlex.join(["mpt", "train", *words, "--nproc", str(best.nproc)])
    fewest = -(-best.nproc // on_machine)
    # all alike
    machines = next(number for number in range(fewest, best.nproc + 1) if best.nproc % number == 0)
    return shlex.join(
        [
            "torchrun",
            f"--nnodes={machines}",
            f"--nproc-per-node={best.nproc // machines}",
            "-m",
            "mpt",
            "train",
            *words,
        ]
    )
