"""`mpt plan cluster CONFIG`: many cards, as `--scaling` from one to thousands or as the cheapest set of `--cards`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from rich.console import Console

from mpt.commands.cli.arguments import PlanClusterArguments
from mpt.commands.cli.command_line import given
from mpt.commands.planning.plan_cheapest import show_cheapest
from mpt.commands.planning.plan_config import free_name, load_planned, sharded
from mpt.commands.planning.plan_tables import print_scaling
from mpt.config.schema import Config
from mpt.errors import ConfigError
from mpt.planner.client.processes import count_workers
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import load_calibration
from mpt.planner.facts.capacity import find_capacity
from mpt.planner.facts.placement import Placement, check_placement
from mpt.planner.recipes import scaling
from mpt.planner.recipes.planned import choose_gpu

OF_SCALING = ("vram", "gpu", "desktop", "nproc", "strategy", "scaling")
"""Options that --cards finds answers to by itself."""


def run(arguments: PlanClusterArguments) -> None:
    """Print what was planned. Raises ConfigError where it is not said what to plan, MemoryBudgetError for no set."""
    if arguments.cards:
        for option in given(arguments, OF_SCALING):
            raise ConfigError(f"{option}: --cards names the cards and finds how many and how; leave it out")
        show_cheapest(load_planned(arguments), arguments)
        return
    if arguments.scaling is None:
        raise ConfigError("mpt plan cluster: add --scaling weak or strong, or --cards NAME:COUNT@PRICE")
    if arguments.allow_lossy:
        raise ConfigError("--allow-lossy: no recipes are searched with --scaling; leave it out")
    show_scaling(load_planned(arguments, *sharded(arguments.strategy)), arguments)


def show_scaling(config: Config, arguments: PlanClusterArguments) -> None:
    """Plan from one card to many, and print and draw them."""
    gpu = choose_gpu(arguments.gpu)
    capacity = find_capacity(gpu, arguments.gpu is not None, arguments.vram, arguments.desktop)
    base = Placement(arguments.nproc or scaling.LARGEST, network=arguments.network, per_machine=arguments.per_machine)
    check_placement(replace(base, strategy=arguments.strategy or base.strategy))
    cluster = base.cluster(gpu)
    picture = free_name("scaling", ".png")
    with Session(gpu, load_calibration(gpu.name), config.granted, count_workers()) as session:
        found = scaling.plan_scaling(
            session, config, str(arguments.scaling), base, arguments.strategy, capacity.budget_bytes
        )
    title = f"{config.heading} on {gpu.name}, {arguments.scaling} scaling, {cluster.link} and {cluster.network}"
    scaling.write_picture(picture, found, title, capacity.budget_bytes)
    if arguments.json:
        print(json.dumps({**scaling.as_data(found), "gpu": asdict(gpu), "written": [str(picture)]}, indent=1))
        return
    console = Console(highlight=False)
    for statement in capacity.statements:
        console.print(statement, markup=False)
    print_scaling(console, found, title)
    console.print(f"wrote {picture}", markup=False)
