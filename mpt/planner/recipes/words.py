"""A plan in words: the answer in one sentence, and the sentences about its parts. The tables are the commands'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpt.config.schema import Config
from mpt.config.sizes import describe_bytes
from mpt.planner.answers.plan import RESUME, InferencePlan, Plan
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import Gpu
from mpt.planner.facts.time_band import BAND, range_of
from mpt.planner.facts.verdict import judge
from mpt.planner.recipes.beside import MadeRoom, moments_that_do_not_fit
from mpt.planner.recipes.recipe import Recipe, describe_patch
from mpt.planner.recipes.search import Search
from mpt.run.process.host_memory import available_bytes


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


def inference_headline(
    config: Config, gpu: Gpu, plan: InferencePlan, frame: tuple[int, int] | None
) -> str:
    """Return the answer in one sentence."""
    subject = f"{config.heading}, inference ({plan.mode})"
    needed = describe_bytes(plan.with_room)
    budget = "" if plan.budget_bytes is None else describe_bytes(plan.budget_bytes)
    if frame is not None:
        if plan.tile is None:
            return f"{subject}, frames of {frame[1]} x {frame[0]}, on {gpu.name}: no tile fits in {budget}."
        height, width = plan.tile
        return (
            f"{subject}, frames of {frame[1]} x {frame[0]}, on {gpu.name}: tiles of {width} "
            f"x {height} fit in {budget}."
        )
    subject = f"{subject}, batch {plan.batch_size}, on {gpu.name}"
    if plan.fits is None:
        return f"{subject}: needs {needed}."
    found = judge(plan)
    assert found is not None
    surely, at_all = plan.largest_batch or 0, plan.largest_at_all or 0
    more = f", and up to {at_all} may" * (at_all > surely)
    fits = "fits" if found.kind == "fits" or at_all > surely else "fits or may fit"
    most = f"the largest batch that {fits} is {surely}{more}" if at_all else "not even 1 fits"
    return f"{subject}: {found.kind} in {budget}, needs {needed}; {most}."


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
    if surely is None:
        return f"{largest}", "may fit; smaller ones were not tried"
    if not surely:
        return f"{largest}", f"may fit, none is sure to{untried}"
    return f"{surely}", f"that fits{f'; up to {largest} may' * (largest > surely)}{untried}"


def describe_band(band: float) -> str:
    """Return the same for any time, as a share."""
    least, most = range_of(band)
    return f"±{band:.0%}" if band <= BAND else f"×{least:g} to {most:g}"


def describe_workspace(plan: Plan) -> str:
    """Return the assumed workspace of cuDNN, and whether there would be no room for it."""
    said = "assumed for its workspace, until `mpt plan calibrate RUN` has measured it"
    room = (
        None
        if plan.budget_bytes is None
        else plan.budget_bytes - plan.context_bytes - plan.allocated
    )
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
    if room is not None and room.moments[name].fits:
        return f"{room.overrides} makes room for it"
    if name == RESUME:  # which has no batch
        return "a mode that holds less, or memory.cpu_optimizer=true"
    if room is not None and "train" in room.patch:
        least = describe_bytes(room.moments[name].reserved + plan.context_bytes)
        return f"no train.batch_size makes room for it: {least} even with one sample"
    if plan.batch_size == 1:
        return "no train.batch_size makes room for it"
    return "use a smaller train.batch_size"


def nothing_fits(recipes: list[Recipe], budget: int, tried_lossy: bool) -> str:
    """Return the message of exit 7."""
    if not recipes:
        return f"nothing fits {describe_bytes(budget)}: no recipe could be planned"
    smallest = min(recipes, key=lambda recipe: recipe.total)
    return (
        f"nothing fits {describe_bytes(budget)}: the smallest of {len(recipes)} recipes found needs "
        f"{describe_bytes(smallest.total)} ({describe_patch(smallest.patch)}); use a smaller train.batch_size or image"
        f"{'' if tried_lossy else ', or --allow-lossy, which also tries what changes the learnt result'}"
    )
