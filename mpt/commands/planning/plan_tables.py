"""The output of `mpt plan`: tables for people, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mpt.commands.cli.console import columns
from mpt.config.layers import write_override
from mpt.config.sizes import describe_bytes
from mpt.planner.answers.plan import RESUME, InferencePlan, Plan, PlannedRanks
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import Gpu
from mpt.planner.facts.verdict import judge
from mpt.planner.recipes.beside import MadeRoom, moments_that_do_not_fit
from mpt.planner.recipes.printed import PlanOutput, Refused, describe_recipe, with_verdict
from mpt.planner.recipes.recipe import EXPLANATIONS, Recipe, describe_cost, describe_patch
from mpt.planner.recipes.scaling import Scaling
from mpt.planner.recipes.search import Search
from mpt.planner.trace.time_model import BAND, range_of
from mpt.report.units import show_seconds
from mpt.run.process.host_memory import available_bytes

SHOWN = 6
REASONS = 3
MODULES = 10
NEAR = 1.06
"""Times and sizes that differ by less than this factor are shown once."""


def headline(name: str, gpu: Gpu, plan: Plan, recipes: Sequence[Recipe]) -> str:
    """Return the answer in one sentence."""
    cards = f"{plan.ranks.nproc} x {gpu.name}, each card" if plan.ranks else gpu.name
    subject = f"{described(name, plan)}, on {cards}"
    if plan.fits is None:
        return f"{subject}: needs {describe_bytes(plan.with_room)}."
    needed, budget = describe_bytes(plan.total), describe_bytes(plan.budget)
    if plan.fits and plan.tight:
        return f"{subject}: fits in {budget} only by emptying the cache in every step, which is slower and may fail."
    if plan.fits:
        found = judge(plan)
        assert found is not None
        if found.kind == "fits":
            return f"{subject}: fits in {budget}, needs {needed}; there is nothing to change."
        closely = f", but closely: {found.percent} % of published runs stayed within such a margin"
        return f"{subject}: may fit in {budget}, needs {needed}{closely}."
    surely = [recipe for recipe in recipes if recipe.fits_well]
    fitting = surely or [recipe for recipe in recipes if recipe.fits]
    verb = "may fit" if not surely else "fits" if len(surely) == 1 else "fit"
    lossy = sum(recipe.is_lossy for recipe in fitting)
    counted = f"{len(fitting)} way{'s' * (len(fitting) > 1)} that {verb}{f', {lossy} of them lossy' * (lossy > 0)}"
    ways = f"; {counted}:" if fitting else "." if not recipes else ", and nothing tried does."
    return f"{subject}: does not fit in {budget}, needs {needed}{ways}"


def described(name: str, plan: Plan) -> str:
    """Return the plan's subject, with its batch if known."""
    return f"{name}, batch {plan.batch_size}" if plan.batch_size else name


def print_plan(console: Console, name: str, gpu: Gpu, calibration: Calibration, plan: Plan, is_verbose: bool) -> None:
    """Print the plan of a configuration, or a step, unchanged; with details also the memory at the peak."""
    console.print(f"{described(name, plan)}, on {gpu.name}, as it stands", style="bold")
    table = columns("", ">", "")
    table.show_header = False
    table.add_row("allocated", describe_bytes(plan.allocated), "tensors and scratch at the peak")
    table.add_row("reserved", describe_bytes(plan.reserved), "by the caching allocator, where there is room")
    source = f"calibrated by {calibration.source}" if calibration.source else "typical"
    ranks = plan.ranks
    if ranks:
        source += f"; {describe_bytes(ranks.communicator_bytes)} of it are NCCL's buffers"
    table.add_row("context", describe_bytes(plan.context_bytes), source)
    if plan.assumed_workspace:
        table.add_row("cuDNN", f"up to {describe_bytes(plan.assumed_workspace)}", describe_workspace(plan))
    table.add_row("total", describe_bytes(plan.total), verdict(plan))
    table.add_row("peak", "", plan.moment)
    for name, moment in plan.moments.items():
        if moment.problem:
            table.add_row(name, "", f"not planned: {moment.problem}")
        else:
            grown = f"{describe_bytes(moment.grown)} more reserved than by the steps"
            said = grown if moment.grown else "in what is reserved"
            said += "; values that it reads taken as 0" if moment.reads_values else ""
            said += f"; and {describe_bytes(moment.host_bytes)} of host memory" if moment.host_bytes else ""
            table.add_row(name, describe_bytes(moment.allocated), said)
    if plan.moments:
        table.add_row("export", describe_bytes(0), "mpt convert builds the networks on the host")
    if plan.largest_batch is not None:
        table.add_row("largest batch", *describe_largest(plan))
    table.add_row(
        "step", show_seconds(plan.step_seconds), describe_range(plan.step_seconds, plan.time_band) + moved(calibration)
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


def describe_range(seconds: float, band: float) -> str:
    """Return how far a time may be from the planned one."""
    least, most = range_of(band)
    if band <= BAND:
        return f"give or take {show_seconds(seconds * band)}"
    return (
        f"{show_seconds(seconds * least)} to {show_seconds(seconds * most)}: no constant meets the published times of "
        "grouped convolutions in channels_last"
    )


def describe_band(band: float) -> str:
    """Return the same for any time, as a share."""
    least, most = range_of(band)
    return f"±{band:.0%}" if band <= BAND else f"×{least:g} to {most:g}"


def describe_workspace(plan: Plan) -> str:
    """Return the assumed workspace of cuDNN, and whether there would be no room for it."""
    said = "assumed for its workspace, until `mpt plan calibrate RUN` has measured it"
    room = None if plan.budget_bytes is None else plan.budget_bytes - plan.context_bytes - plan.allocated
    if not plan.fits or room is None or plan.assumed_workspace <= room:
        return said
    return f"{said}; {describe_bytes(max(0, room))} are left for it, so that slower kernels may be chosen"


def describe_host(plan: Plan) -> str:
    """Return whose host memory it is, and whether this machine has as much."""
    said = f"{'a rank: ' if plan.ranks else ''}what waits there, pinned blocks rounded up to powers of two"
    left = available_bytes()
    if left is None or plan.host_bytes < left:
        return said
    return f"{said}; this machine has {describe_bytes(left)} left"


def moved(calibration: Calibration) -> str:
    """Return which other card the step's time was fitted on, if one was."""
    if not calibration.time_from:
        return ""
    return f"; ×{calibration.time_factor:.2f} as measured on {calibration.time_from}, moved by both cards' rooflines"


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
    """Add the lines about a rank of several."""
    seconds = ranks.seconds
    where = ranks.link if ranks.nproc <= ranks.per_machine else f"{ranks.link} and {ranks.network}"
    table.add_row(
        "communication",
        show_seconds(seconds.communication),
        f"of a step, over {where}: {show_seconds(seconds.overlapped)} beside computing, "
        f"{show_seconds(seconds.exposed)} exposed",
    )
    table.add_row("efficiency", f"{seconds.computing / seconds.total:.0%}", "of the step is computing")
    samples = f"{ranks.samples} samples, {ranks.words}"
    if ranks.last_total is not None:
        last = f"the last has {ranks.last_samples} and needs {describe_bytes(ranks.last_total)}"
        samples += f"; {last}"
    table.add_row("rank", f"1 of {ranks.nproc}", samples)


def scaling_cells(scaling: Scaling) -> Sequence[tuple[str, ...]]:
    """Return the cells of a table: cards, strategy, batch, memory, fits, step, exposed, efficiency, bottleneck."""
    cells = []
    for row in scaling.planned:
        fits = {True: "yes", False: "no", None: ""}[row.plan.fits]
        cells.append((
            str(row.nproc),
            row.words,
            f"{row.batch_size:,}",
            describe_bytes(row.plan.total),
            fits,
            show_seconds(row.plan.step_seconds),
            show_seconds(row.exposed_seconds),
            f"{scaling.efficiency(row):.0%}",
            row.bottleneck,
        ))  # fmt: skip
    return cells


def print_scaling(console: Console, found: Scaling, title: str) -> None:
    """Print one line for each number of cards and strategy, and the fewest cards that it fits on."""
    console.print(title, style="bold")
    table = columns(">cards", "", ">batch", ">memory", "fits", ">step", ">exposed", ">efficiency", "limited by")
    for cells in scaling_cells(found):
        table.add_row(*cells)
    console.print(table)
    for reason in found.refused():
        console.print(f"not planned: {reason}")
    if found.fewest is not None:
        console.print(f"the fewest cards that train this: {found.fewest.nproc} ({found.fewest.words})", style="bold")
    elif any(row.plan.fits is False for row in found.planned):
        console.print("none of these fits", style="bold")


def verdict(plan: Plan) -> str:
    """Return whether the configuration fits, in words."""
    if plan.fits is None:
        return "no budget given (--vram or --gpu)"
    budget = describe_bytes(plan.budget)
    if not plan.fits:
        return f"does not fit in {budget}"
    if plan.tight:
        return f"fits in {budget} only by emptying the cache in every step (tight)"
    found = judge(plan)
    assert found is not None
    return f"{'fits' if found.kind == 'fits' else 'may fit'} in {budget} ({found.likely})"


def describe_largest(plan: Plan) -> tuple[str, str]:
    """Return the largest batch and the known facts of it."""
    largest, surely, is_bound = plan.largest_batch, plan.largest_surely, plan.largest_is_bound
    if not largest:
        return "", f"none found below {plan.batch_size}" if is_bound else "not even 1 fits"
    untried = "; larger ones were not tried" * is_bound
    if not surely:
        return f"{largest}", f"may fit, none is sure to{untried}"
    return f"{surely}", f"that fits{f'; up to {largest} may' * (largest > surely)}{untried}"


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
    table = columns("recipe", ">memory", ">chance", f">step {describe_band(plan.time_band)}", "cost")
    for recipe in shown:
        seconds = show_seconds(recipe.plan.step_seconds)
        verdict_of = judge(recipe.plan)
        chance = f"{verdict_of.percent} %" if verdict_of else ""
        words = describe_patch(recipe.patch), describe_bytes(recipe.total), chance, seconds, describe_cost(recipe)
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
        console.print(f"{beyond} more reason{'s' * (beyond > 1)} with --json", style="dim")


def worth_showing(ranked: list[Recipe]) -> list[Recipe]:
    """Leave out recipes that come after a gentler one and save next to nothing, neither time nor memory."""
    shown: list[Recipe] = []
    for recipe in ranked:
        if not any(is_better(one, recipe) for one in shown):
            shown.append(recipe)
    return shown


def is_better(one: Recipe, other: Recipe) -> bool:
    """Return whether a recipe is no harsher than another, and hardly slower or larger."""
    return (
        one.harshness <= other.harshness
        and one.plan.step_seconds <= NEAR * other.plan.step_seconds
        and one.total <= NEAR * other.total
    )


def describe_counts(found: Search) -> str:
    """Return how many recipes there were, and their fate."""
    traced = sum(recipe.traced for recipe in found.recipes)
    parts = [f"{traced} recipe{'s' * (traced != 1)} traced"]
    if traced < len(found.recipes):
        parts.append(f"{len(found.recipes) - traced} more replayed with expandable segments")
    surely = sum(recipe.fits_well for recipe in found.recipes)
    may = sum(recipe.fits for recipe in found.recipes) - surely
    parts.append(f"{surely} fit{f', {may} more may' * (may > 0)}")
    if found.hopeless:
        parts.append(f"{len(found.hopeless)} ruled out by what others hold")
    if found.refused:
        parts.append(f"{len(found.refused)} refused")
    return "; ".join(parts)


def describe_too_large(plan: Plan, room: MadeRoom | None) -> Iterator[str]:
    """Yield a sentence for each part of the run outside its steps that does not fit, with the remedy."""
    for name in moments_that_do_not_fit(plan):
        beyond = describe_bytes(plan.moments[name].reserved + plan.context_bytes)
        yield f"its {name} does not fit beside that: {beyond}; {way_out(name, plan, room)}"


def way_out(name: str, plan: Plan, room: MadeRoom | None) -> str:
    """Return the advice for a plan that does not fit."""
    moment = room.moments[name] if room is not None else None
    if room is not None and moment is not None and moment.fits:
        change = " ".join(write_override(f"memory.{key}", value) for key, value in room.patch["memory"].items())
        return f"{change} makes room for it"
    if name == RESUME:  # which has no batch
        return "a mode that holds less, or memory.cpu_optimizer=true"
    return "use a smaller train.batch_size"


def as_data(gpu: Gpu, calibration: Calibration, plan: Plan, found: Search, written: list[str]) -> dict[str, Any]:
    """Return everything as JSON can hold it, pictures' curves aside."""
    output = PlanOutput(
        gpu=gpu,
        calibration=calibration,
        plan=with_verdict(plan),
        recipes=[describe_recipe(recipe) for recipe in found.recipes],
        refused=[Refused(patch, reason) for patch, reason in found.refused],
        hopeless=found.hopeless,
        written=written,
    )
    return output.as_data()
