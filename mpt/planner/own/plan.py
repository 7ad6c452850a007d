"""A training step outside of mpt planned, and changes to the script so that it needs less.

Runs inside the worker process (`mpt.planner.server.worker`).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain, compress, product
from typing import Any

from mpt.errors import MptError
from mpt.planner.answers.edits import Edit
from mpt.planner.answers.own_plan import ORDER, OwnPlan, Way
from mpt.planner.answers.plan import Plan
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import Gpu
from mpt.planner.own.execution.factory import batch_size_of
from mpt.planner.own.execution.source import Source
from mpt.planner.own.proposals.accumulation import FACTORS
from mpt.planner.own.proposals.changes import Changes
from mpt.planner.own.proposals.edits import without_library
from mpt.planner.own.proposals.options import Words
from mpt.planner.own.trace import OwnRun, import_factory, trace_own
from mpt.planner.plans.plan import Wish, describe
from mpt.planner.step.run_fake import FakeRun
from mpt.planner.trace.unseen import unseen_on

PATIENCE = 90.0
"""Seconds after which no further change is tried: a script may evaluate at length before it trains."""
EXACT = {"recompute"}
"""Changes with which the training stays the same to rounding."""
Names = frozenset[str]
"""Changes: recompute, autocast, optimizer, accumulate."""
SMALLER = frozenset({"accumulate"})
SMALLER_BATCHES = {
    True: "the same samples, of which BatchNorm sees fewer at a time",
    False: "the same samples in smaller batches",
}
"""Whether there is a batch normalization -> what accumulation changes."""
SAME_WORK = 0.75
"""Share of a step's time below which a script with smaller batches trains with fewer samples."""
LEAST_SAVING = 0.98
"""A way that still needs more than this share of the step unchanged is left out."""


@dataclass(frozen=True)
class Planned:
    """How changes are planned."""

    changes: Changes = field(default_factory=Changes)
    """Those that are made from outside."""
    edits: tuple[Edit, ...] = ()
    """Those in the script's text."""
    words: tuple[str, ...] = ()
    """Those by options of its command line."""

    @classmethod
    def of(cls, names: Names, run: OwnRun, source: Source, options: Mapping[str, Words]) -> Planned:
        """Take a script's own options, else change its text where it can be: a module's file is imported once."""

        # a library's argument imports what need not be installed
        is_there = find_spec("bitsandbytes") is not None
        is_said = any(edit.how == "argument" for edit in run.edits["optimizer"]) and not is_there
        low_bits = () if is_said else tuple(map(without_library, run.edits["optimizer"]))
        texts = {**run.edits, "optimizer": low_bits}

        def in_text(name: str) -> bool:
            files = {edit.file for edit in texts[name]}
            return bool(files) and (source.is_script or files == {source.where})

        from_outside: dict[str, dict[str, Any]] = {
            "autocast": {"autocast": run.half},
            "recompute": {"recompute": run.recomputed},
            "optimizer": {"low_bit_optimizer": True, "keeps_embeddings": is_said},
        }
        words: list[str] = []
        edits: list[Edit] = []
        made: dict[str, Any] = {}
        for name in filter(names.__contains__, ORDER):
            if name in options:
                words += options[name]
            elif in_text(name):
                edits += texts[name]
            else:
                made |= from_outside[name]
        return cls(Changes(**made), tuple(edits), tuple(words))


AS_IT_IS = Planned()
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
        unseen = unseen_on(gpu, calibration)
        words = (*source.words, *planned.words)
        given = {**arguments, **changed}
        changed_source = replace(source, edits=planned.edits, words=words)
        return trace_own(changed_source, given, gpu, unseen, planned.changes, like)

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
    options = dict(run.options)

    def plan_way(names: Names) -> Way | None:
        """Return a way with changes; None if it saves nothing."""
        by_option = names & options.keys()
        try:
            changed = trace(run, Planned.of(names, run, source, options))
        except (
            MptError
        ):  # a block that cannot be recomputed, a loss that autocast refuses: no way, then
            if len(names) == 1:
                options.pop(min(names), None)
            return None
        planned = describe(
            changed.fake,
            batch_size or 0,
            gpu,
            calibration,
            without_largest,
            calibration.context_bytes,
            False,
            None,
        )
        if by_option and not keeps_its_name(names, run, changed, plan, planned):
            return None
        if planned.reserved > LEAST_SAVING * plan.reserved:
            return None
        words = {name: shlex.join(options[name]) for name in ORDER if name in by_option}
        written = [name for name in ORDER if name in names - options.keys()]
        edits = [edit for name in written for edit in run.edits[name]]
        left = {name: run.unplaced[name] for name in written if not run.edits[name]}
        lines = [*chain(*(edit.lines for edit in edits), *left.values())]
        note = SMALLER_BATCHES[run.has_statistics] if "accumulate" in names else ""
        return Way(lines, names <= EXACT, planned, edits, left, words, note)

    def in_smaller_batches() -> list[tuple[Names, Way]]:
        """Return the way with the largest batch that fits, with more of them for an update; the smallest if none does.

        That one once more with the changes that save most.
        """
        found: list[tuple[Names, Way]] = []
        for words in filter(None, map(run.accumulation.words, FACTORS) if run.accumulation else ()):
            if time.perf_counter() - started > PATIENCE:
                return found
            options["accumulate"] = words
            way = plan_way(SMALLER)
            if way is None:
                return found
            found = [(SMALLER, way)]
            if way.plan.fits is not False:
                return found
        if found and ways:
            names = min(ways, key=lambda one: one[1].plan.reserved)[0] | SMALLER
            way = plan_way(names)
            found += [(names, way)] if way is not None else []
        return found

    ways: list[tuple[Names, Way]] = []
    for number, names in enumerate(find_changes(run) if with_changes else (), 1):
        seconds = time.perf_counter() - started
        if seconds > PATIENCE:
            untried = f"further changes were not tried: {number} plans took {seconds:.0f} s"
            plan = replace(plan, notes=[*plan.notes, untried])
            break
        if not names <= run.changes | options.keys():
            continue
        own = options.get(min(names)) if len(names) == 1 else None
        way = plan_way(names)
        if way is None and own and names <= run.changes:
            options.pop(min(names), None)
            way = plan_way(names)
            if way is None:
                options[min(names)] = own
        if way is not None:
            ways.append((names, way))
    if with_changes and plan.fits is False:
        ways += in_smaller_batches()
    plan = replace(plan, planning_seconds=time.perf_counter() - started)
    return OwnPlan(str(source), plan, sorted(worth_their_changes(ways), key=_rank))


def keeps_its_name(names: Names, run: OwnRun, changed: OwnRun, plan: Plan, planned: Plan) -> bool:
    """Return whether options do what they are named for, and not something else: another network, data in half.

    What is computed again takes longer, and no change here leaves weights out.
    """
    return (
        changed.weights == run.weights
        and ("autocast" not in names or changed.is_half)
        and (names != {"recompute"} or planned.step_seconds >= plan.step_seconds)
        and (names != SMALLER or planned.step_seconds >= SAME_WORK * plan.step_seconds)
    )


def worth_their_changes(ways: Sequence[tuple[Names, Way]]) -> list[Way]:
    """Leave out ways of which fewer changes save as much in the same time."""

    def is_no_better(way: Way, other: Way) -> bool:
        saves = way.plan.reserved <= LEAST_SAVING * other.plan.reserved
        is_faster = way.plan.step_seconds <= LEAST_SAVING * other.plan.step_seconds
        return not (saves or is_faster)

    return [
        way
        for names, way in ways
        if not any(fewer < names and is_no_better(way, other) for fewer, other in ways)
    ]


def find_changes(run: OwnRun) -> Iterator[Names]:
    """Yield possible changes of a step, each alone before it is one of several."""
    possible = run.changes | run.options.keys()
    order = [name for name in ("autocast", "recompute", "optimizer") if name in possible]
    for chosen in product((False, True), repeat=len(order)):
        if any(chosen):
            yield frozenset(compress(order, chosen))


def _rank(way: Way) -> tuple[bool, bool, float]:
    fits = way.plan.fits is not False
    return (
        not fits,
        fits and not way.exact,
        way.plan.step_seconds if fits and way.plan.fits else way.plan.reserved,
    )
