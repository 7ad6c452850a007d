"""A training step outside of mpt planned, and changes to the script so that it needs less.

Runs inside the worker process (`mpt.planner.server.worker`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from mpt.errors import MptError
from mpt.planner.answers.own_plan import OwnPlan, Way
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import Gpu
from mpt.planner.own.changes import NOTHING, Changes
from mpt.planner.own.factory import batch_size_of
from mpt.planner.own.source import Source
from mpt.planner.own.trace import OwnRun, import_factory, trace_own
from mpt.planner.plans.plan import Wish, describe
from mpt.planner.step.run_fake import FakeRun
from mpt.planner.trace.unseen import Unseen

BFLOAT16_SINCE = (8, 0)
PATIENCE = 90.0
"""Seconds after which no further change is tried: a script may evaluate at length before it trains."""
LEAST_SAVING = 0.98
"""A way that still needs more than this share of the step unchanged is left out."""


def plan_own(
    source: Source,
    arguments: Mapping[str, Any],
    gpu: Gpu,
    calibration: Calibration,
    wish: Wish,
    with_changes: bool = True,
) -> OwnPlan:
    """Plan a step unchanged, and with each change that it could take if asked for.

    Raises CannotPlan with module and line, and ConfigError for a factory that is not there or returns something else.
    """
    started = time.perf_counter()
    batch_size = batch_size_of(import_factory(source, gpu), arguments)

    def trace(changes: Changes, like: OwnRun | None, **changed: Any) -> OwnRun:
        unseen = Unseen(gpu.capability, False, calibration.context_bytes, calibration.cudnn_share)
        return trace_own(source, {**arguments, **changed}, gpu, unseen, changes, like)

    run = trace(Changes(), None)

    def at_batch(batch: int) -> FakeRun:
        return trace(Changes(), run, batch_size=batch).fake

    retrace = None if batch_size is None else at_batch
    plan = describe(
        run.fake, batch_size or 0, gpu, calibration, wish, calibration.context_bytes, False, retrace
    )
    without_largest = replace(wish, largest_batch=False, snapshot="")
    ways: list[tuple[Changes, Way]] = []
    for number, changes in enumerate(find_changes(run, gpu) if with_changes else (), 1):
        seconds = time.perf_counter() - started
        if seconds > PATIENCE:
            untried = f"further changes were not tried: {number} plans took {seconds:.0f} s"
            plan = replace(plan, notes=[*plan.notes, untried])
            break
        try:
            changed = trace(changes, run).fake
        except (
            MptError
        ):  # a block that cannot be recomputed, a loss that autocast refuses: no way, then
            continue
        planned = describe(
            changed,
            batch_size or 0,
            gpu,
            calibration,
            without_largest,
            calibration.context_bytes,
            False,
            None,
        )
        if planned.reserved <= LEAST_SAVING * plan.reserved:
            ways.append((changes, Way(changes.lines(), changes.is_exact, planned)))
    plan = replace(plan, planning_seconds=time.perf_counter() - started)
    return OwnPlan(str(source), plan, sorted(worth_their_changes(ways), key=_rank))


def worth_their_changes(ways: Sequence[tuple[Changes, Way]]) -> list[Way]:
    """Leave out ways of which fewer changes save as much in the same time."""

    def is_no_better(way: Way, other: Way) -> bool:
        saves = way.plan.reserved <= LEAST_SAVING * other.plan.reserved
        return not saves and way.plan.step_seconds >= other.plan.step_seconds

    return [
        way
        for changes, way in ways
        if not any(
            fewer != changes and fewer.is_part_of(changes) and is_no_better(way, other)
            for fewer, other in ways
        )
    ]


def find_changes(run: OwnRun, gpu: Gpu) -> Iterator[Changes]:
    """Yield possible changes of a step, each alone and then together."""
    half = "" if run.has_autocast else "bfloat16" if gpu.capability >= BFLOAT16_SINCE else "float16"
    found = (
        Changes(*chosen)
        for chosen in product(("", half), (NOTHING, run.recomputed), (False, run.has_adam))
    )
    yield from (changes for changes in dict.fromkeys(found) if changes != Changes())


def _rank(way: Way) -> tuple[bool, bool, float]:
    fits = way.plan.fits is not False
    return (
        not fits,
        fits and not way.exact,
        way.plan.step_seconds if fits and way.plan.fits else way.plan.reserved,
    )
