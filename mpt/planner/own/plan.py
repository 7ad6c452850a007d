"""A training step outside of mpt planned, and changes to the script so that it needs less.

Runs inside the worker process (`mpt.planner.server.worker`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, product
from typing import Any

from mpt.errors import MptError
from mpt.planner.answers.edits import Edit
from mpt.planner.answers.own_plan import OwnPlan, Way
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import Gpu
from mpt.planner.own.changes import NOTHING, Changes
from mpt.planner.own.factory import batch_size_of
from mpt.planner.own.proposals import without_library
from mpt.planner.own.source import Source
from mpt.planner.own.trace import OwnRun, import_factory, trace_own
from mpt.planner.plans.plan import Wish, describe
from mpt.planner.step.run_fake import FakeRun
from mpt.planner.trace.unseen import Unseen

PATIENCE = 90.0
"""Seconds after which no further change is tried: a script may evaluate at length before it trains."""
LEAST_SAVING = 0.98
"""A way that still needs more than this share of the step unchanged is left out."""


@dataclass(frozen=True)
class Planned:
    """How changes are planned."""

    changes: Changes
    """Those that are made from outside."""
    edits: tuple[Edit, ...] = ()
    """The others, in the script's text."""

    @classmethod
    def of(cls, changes: Changes, run: OwnRun, source: Source) -> Planned:
        """Let the text be changed where it can be: a module's file is imported once."""

        def in_text(name: str) -> bool:
            files = {edit.file for edit in run.edits[name]}
            return bool(files) and (source.is_script or files == {source.where})

        edits: list[Edit] = []
        if changes.autocast and in_text("autocast"):
            edits += run.edits["autocast"]
            changes = replace(changes, autocast="")
        if changes.recompute != NOTHING and in_text("recompute"):
            edits += run.edits["recompute"]
            changes = replace(changes, recompute=NOTHING)
        # a library's argument imports what need not be installed
        is_there = find_spec("bitsandbytes") is not None
        is_said = any(edit.how == "argument" for edit in run.edits["optimizer"]) and not is_there
        if is_said:
            changes = replace(changes, keeps_embeddings=changes.low_bit_optimizer)
        elif changes.low_bit_optimizer and in_text("optimizer"):
            edits += map(without_library, run.edits["optimizer"])
            changes = replace(changes, low_bit_optimizer=False)
        return cls(changes, tuple(edits))


AS_IT_IS = Planned(Changes())
NO_SIZE = "no largest batch: neither its words nor its text name a batch size (a function takes `batch_size`)"


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

    def trace(like: OwnRun | None, planned: Planned = AS_IT_IS, **changed: Any) -> OwnRun:
        unseen = Unseen(gpu.capability, False, calibration.context_bytes, calibration.cudnn_share)
        text = replace(source, edits=planned.edits)
        given = {**arguments, **changed}
        return trace_own(text, given, gpu, unseen, planned.changes, like)

    run = trace(None)

    def at_batch(batch: int) -> FakeRun:
        return trace(run, batch_size=batch).fake

    retrace = None if batch_size is None else at_batch
    if wish.largest_batch and retrace is None:
        run.fake.notes.append(NO_SIZE)
    plan = describe(
        run.fake, batch_size or 0, gpu, calibration, wish, calibration.context_bytes, False, retrace
    )
    without_largest = replace(wish, largest_batch=False, snapshot="")
    ways: list[tuple[Changes, Way]] = []
    for number, changes in enumerate(find_changes(run) if with_changes else (), 1):
        seconds = time.perf_counter() - started
        if seconds > PATIENCE:
            untried = f"further changes were not tried: {number} plans took {seconds:.0f} s"
            plan = replace(plan, notes=[*plan.notes, untried])
            break
        try:
            changed = trace(run, Planned.of(changes, run, source)).fake
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
            edits = [edit for name in changes.names for edit in run.edits[name]]
            left = {name: run.unplaced[name] for name in changes.names if not run.edits[name]}
            lines = [*chain(*(edit.lines for edit in edits), *left.values())]
            ways.append((changes, Way(lines, changes.is_exact, planned, edits, left)))
    plan = replace(plan, planning_seconds=time.perf_counter() - started)
    return OwnPlan(str(source), plan, sorted(worth_their_changes(ways), key=_rank))


def worth_their_changes(ways: Sequence[tuple[Changes, Way]]) -> list[Way]:
    """Leave out ways of which fewer changes save as much in the same time."""

    def is_no_better(way: Way, other: Way) -> bool:
        saves = way.plan.reserved <= LEAST_SAVING * other.plan.reserved
        is_faster = way.plan.step_seconds <= LEAST_SAVING * other.plan.step_seconds
        return not (saves or is_faster)

    return [
        way
        for changes, way in ways
        if not any(
            fewer != changes and fewer.is_part_of(changes) and is_no_better(way, other)
            for fewer, other in ways
        )
    ]


def find_changes(run: OwnRun) -> Iterator[Changes]:
    """Yield possible changes of a step, each alone and then together."""
    found = (
        Changes(*chosen)
        for chosen in product(("", run.half), (NOTHING, run.recomputed), (False, run.has_adam))
    )
    yield from (changes for changes in dict.fromkeys(found) if changes != Changes())


def _rank(way: Way) -> tuple[bool, bool, float]:
    fits = way.plan.fits is not False
    return (
        not fits,
        fits and not way.exact,
        way.plan.step_seconds if fits and way.plan.fits else way.plan.reserved,
    )
