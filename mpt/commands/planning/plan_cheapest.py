"""`mpt plan cluster CONFIG --cards rtx3090:4@0.3 --cards h100:8@2`: the cheapest set of these cards that trains it."""

from __future__ import annotations

import json
import shlex
from typing import Any

from rich.console import Console

from mpt.commands.cli.arguments import PlanClusterArguments
from mpt.commands.planning.plan_progress import progress
from mpt.commands.planning.plan_tables import columns
from mpt.config.differences import flatten
from mpt.config.layers import write_override
from mpt.config.schema import Config
from mpt.config.sizes import describe_bytes
from mpt.errors import MemoryBudgetError
from mpt.planner.client.processes import count_workers
from mpt.planner.recipes.cheapest import Candidate, Cheapest, find_cheapest, parse_offers
from mpt.planner.recipes.recipe import describe_patch, without_conflicts
from mpt.report.units import show_seconds


def show_cheapest(config: Config, arguments: PlanClusterArguments) -> None:
    """Search and print. Raises MemoryBudgetError where no set of the cards is enough."""
    with progress() as told:
        found = find_cheapest(
            config,
            parse_offers(arguments.cards),
            network=arguments.network,
            per_machine=arguments.per_machine,
            allow_lossy=arguments.allow_lossy,
            workers=count_workers(),
            on_answer=told,
        )
    if arguments.json:
        print(json.dumps(as_data(found, arguments), indent=1))
    else:
        print_cheapest(Console(highlight=False), found, config, arguments)
    if found.best is None:
        raise MemoryBudgetError("no set of these cards trains this; use more of them, or a smaller train.batch_size")


def print_cheapest(console: Console, found: Cheapest, config: Config, arguments: PlanClusterArguments) -> None:
    """Print what was planned, cheapest first, and the command for the answer."""
    table = columns(">price", "cards", "", ">memory", "fits", ">step", ">samples/s")
    for one in found.candidates:
        cards = f"{one.nproc} x {one.gpu.name}"
        if one.error:
            table.add_row(f"{one.price:g}", cards, one.words, "", one.error.split(": ", 1)[-1][:60], "", "")
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
    console.print(f"{config.heading}, batch {config.train.batch_size} of all cards together", style="bold")
    console.print(table)
    best = found.best
    if best is not None:
        console.print(
            f"the cheapest set that trains this: {best.nproc} x {best.gpu.name}, {best.words}",
            style="bold",
            markup=False,
        )
        console.print(f"  {command_for(best, arguments)}", markup=False, soft_wrap=True)


def command_for(best: Candidate, arguments: PlanClusterArguments) -> str:
    """Return what starts the training on a set of cards; of several machines, on each of them."""
    settings = [write_override(key, value) for key, value in flatten(best.settings).items()]
    words = [str(arguments.config), *without_conflicts(arguments.overrides, best.settings), *settings]
    words += [word for patch in arguments.patches for word in ("--with", str(patch))]
    if best.nproc == 1:
        return shlex.join(["mpt", "train", *words])
    if best.nproc <= arguments.per_machine:
        return shlex.join(["mpt", "train", *words, "--nproc", str(best.nproc)])
    fewest = -(-best.nproc // arguments.per_machine)
    machines = next(number for number in range(fewest, best.nproc + 1) if best.nproc % number == 0)  # all alike
    return shlex.join(
        ["torchrun", f"--nnodes={machines}", f"--nproc-per-node={best.nproc // machines}", "-m", "mpt", "train", *words]
    )


def as_data(found: Cheapest, arguments: PlanClusterArguments) -> dict[str, Any]:
    """Return it as JSON can hold it."""
    best = found.best
    return {
        "candidates": [one_as_data(one) for one in found.candidates],
        "best": None if best is None else {**one_as_data(best), "command": command_for(best, arguments)},
    }


def one_as_data(one: Candidate) -> dict[str, Any]:
    """Return a candidate as JSON can hold it."""
    common = {
        "gpu": one.gpu.name,
        "nproc": one.nproc,
        "price": one.price,
        **one.way,
        "recipe": describe_patch(one.patch),
    }
    if one.error:
        return {**common, "error": one.error}
    return {
        **common,
        "settings": one.settings,
        "fits": one.fits,
        "total_bytes": one.plan.total,
        "budget_bytes": one.plan.budget_bytes,
        "step_seconds": one.plan.step_seconds,
    }
