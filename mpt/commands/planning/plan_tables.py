"""The tables of `mpt plan`; its sentences are the planner's (`mpt.planner.recipes.words`)."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from mpt.commands.cli.console import columns
from mpt.config.sizes import describe_bytes
from mpt.planner.answers.plan import InferencePlan, Plan, PlannedRanks
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import Gpu
from mpt.planner.facts.time_band import BAND, FAST_BAND, range_of
from mpt.planner.facts.verdict import judge
from mpt.planner.recipes.recipe import EXPLANATIONS, describe_cost, describe_patch, worth_showing
from mpt.planner.recipes.scaling import Scaling
from mpt.planner.recipes.search import Search
from mpt.planner.recipes.words import (
    describe_band,
    describe_counts,
    describe_host,
    describe_largest,
    describe_workspace,
    described,
    moved,
    verdict,
)
from mpt.report.units import counted, show_seconds

SHOWN = 6
REASONS = 3
MODULES = 10


def print_plan(
    console: Console, name: str, gpu: Gpu, calibration: Calibration, plan: Plan, is_verbose: bool
) -> None:
    """Print the plan of a configuration, or a step, unchanged; with details also the memory at the peak."""
    console.print(f"{described(name, plan)}, on {gpu.name}, as it stands", style="bold")
    table = memory_table(plan)
    source = f"calibrated by {calibration.source}" if calibration.source else "typical"
    ranks = plan.ranks
    if ranks:
        source += f"; {describe_bytes(ranks.communicator_bytes)} of it are NCCL's buffers"
    table.add_row("context", describe_bytes(plan.context_bytes), source)
    if plan.assumed_workspace:
        table.add_row(
            "cuDNN", f"up to {describe_bytes(plan.assumed_workspace)}", describe_workspace(plan)
        )
    table.add_row("total", describe_bytes(plan.total), verdict(plan))
    table.add_row("peak", "", plan.moment)
    for name, moment in plan.moments.items():
        if moment.problem:
            table.add_row(name, "", f"not planned: {moment.problem}")
        else:
            grown = f"{describe_bytes(moment.grown)} more reserved than by the steps"
            said = grown if moment.grown else "in what is reserved"
            said += "; values that it reads taken as 0" if moment.reads_values else ""
            said += (
                f"; and {describe_bytes(moment.host_bytes)} of host memory"
                if moment.host_bytes
                else ""
            )
            table.add_row(name, describe_bytes(moment.allocated), said)
    if plan.moments:
        table.add_row("export", describe_bytes(0), "mpt convert builds the networks on the host")
    if plan.largest_batch is not None:
        table.add_row("largest batch", *describe_largest(plan))
    table.add_row(
        "step",
        show_seconds(plan.step_seconds),
        describe_range(plan.step_seconds, plan.time_band) + moved(calibration),
    )
    if plan.host_bytes:
        table.add_row("host memory", describe_bytes(plan.host_bytes), describe_host(plan))
    if ranks:
        add_rank_rows(table, ranks)
    console.print(table)
    if is_verbose:
        console.print()
        console.print(held_tables(plan))
    for note in plan.notes:
        console.print(f"note: {note}")


def memory_table(plan: Plan | InferencePlan) -> Table:
    """Return the first rows of a plan's table."""
    table = columns("", ">", "")
    table.show_header = False
    table.add_row("allocated", describe_bytes(plan.allocated), "tensors and scratch at the peak")
    table.add_row(
        "reserved", describe_bytes(plan.reserved), "by the caching allocator, where there is room"
    )
    return table


def describe_range(seconds: float, band: float) -> str:
    """Return how far a time may be from the planned one."""
    least, most = range_of(band)
    if band <= BAND:
        return f"give or take {show_seconds(seconds * band)}"
    why = (
        "few steps fill a card of such bandwidth"
        if band <= FAST_BAND
        else "no constant meets the published times of grouped convolutions in channels_last"
    )
    return f"{show_seconds(seconds * least)} to {show_seconds(seconds * most)}: {why}"


def held_tables(plan: Plan | InferencePlan) -> Table:
    """Return the memory at the peak, by kind and by module, side by side."""
    held = columns("held at the peak", ">MiB")
    for name, amount in plan.by_category.items():
        held.add_row(name, f"{amount / 2**20:,.1f}")
    modules = columns("modules that hold most", ">MiB")
    for name, amount in plan.by_module[:MODULES]:
        modules.add_row(name, f"{amount / 2**20:,.1f}")
    sides = Table.grid(padding=(0, 4))
    sides.add_row(held, modules)
    return sides


def add_rank_rows(table: Table, ranks: PlannedRanks) -> None:
    seconds = ranks.seconds
    where = ranks.link if ranks.nproc <= ranks.per_machine else f"{ranks.link} and {ranks.network}"
    table.add_row(
        "communication",
        show_seconds(seconds.communication),
        f"of a step, over {where}: {show_seconds(seconds.overlapped)} beside computing, "
        f"{show_seconds(seconds.exposed)} exposed",
    )
    table.add_row(
        "efficiency", f"{seconds.computing / seconds.total:.0%}", "of the step is computing"
    )
    samples = f"{ranks.samples} samples, {ranks.words}"
    if ranks.last_total is not None:
        last = f"the last has {ranks.last_samples} and needs {describe_bytes(ranks.last_total)}"
        samples += f"; {last}"
    table.add_row("rank", f"1 of {ranks.nproc}", samples)


def print_scaling(console: Console, found: Scaling, title: str) -> None:
    """Print one line for each number of cards and strategy, and the fewest cards that it fits on."""
    console.print(title, style="bold")
    table = columns(
        ">cards", "", ">batch", ">memory", "fits", ">step", ">exposed", ">efficiency", "limited by"
    )
    for row in found.planned:
        table.add_row(
            str(row.nproc),
            row.words,
            f"{row.batch_size:,}",
            describe_bytes(row.plan.total),
            {True: "yes", False: "no", None: ""}[row.plan.fits],
            show_seconds(row.plan.step_seconds),
            show_seconds(row.exposed_seconds),
            f"{found.efficiency(row):.0%}",
            row.bottleneck,
        )
    console.print(table)
    for reason in found.refused():
        console.print(f"not planned: {reason}")
    if found.fewest is not None:
        console.print(
            f"the fewest cards that train this: {found.fewest.nproc} ({found.fewest.words})",
            style="bold",
        )
    elif any(row.plan.fits is False for row in found.planned):
        console.print("none of these fits", style="bold")


def print_search(console: Console, found: Search, plan: Plan) -> None:
    """Print the best few recipes, the meaning of their costs, and how many there were."""
    budget = describe_bytes(plan.budget)
    fitting = [recipe for recipe in found.recipes if recipe.fits]
    if fitting:
        shown = worth_showing(fitting)[:SHOWN]
        more = f", {len(fitting) - len(shown)} more with --json" * (len(fitting) > len(shown))
        console.print(f"\nfastest that fit in {budget}{more}", style="bold")
    else:
        shown = sorted(found.recipes, key=lambda recipe: recipe.total)[:SHOWN]
        console.print(f"\nnone fits in {budget}; the smallest", style="bold")
    table = columns(
        "recipe", ">memory", ">chance", f">step {describe_band(plan.time_band)}", "cost"
    )
    for recipe in shown:
        seconds = show_seconds(recipe.plan.step_seconds)
        verdict_of = judge(recipe.plan)
        chance = f"{verdict_of.percent} %" if verdict_of else ""
        words = (
            describe_patch(recipe.patch),
            describe_bytes(recipe.total),
            chance,
            seconds,
            describe_cost(recipe),
        )
        table.add_row(*words)
    console.print(table)
    spoken = " ".join(f"{describe_cost(recipe)} {describe_patch(recipe.patch)}" for recipe in shown)
    for term, meaning in EXPLANATIONS.items():
        if term in spoken:
            console.print(f"{term}: {meaning}", style="dim")
    console.print(describe_counts(found))
    reasons = list(dict.fromkeys(reason for _, reason in found.refused))
    for reason in reasons[:REASONS]:
        console.print(f"refused: {reason}", style="dim")
    if len(reasons) > REASONS:
        beyond = len(reasons) - REASONS
        console.print(f"{counted(beyond, 'more reason')} with --json", style="dim")
