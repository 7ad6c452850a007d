"""The plan of one configuration: memory, whether it fits, its parts, and the time of a step.

Traces once at the configured batch and, when the largest batch is asked for, once more at twice of it; everything
else is replaying. That goes for growing segments too: they change where tensors lie and not which there are, so each
plan that is held back by its budget has their effect. Runs inside the worker process
(`mpt.planner.server.worker`); the result is plain data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mpt.config.schema import Config
from mpt.memory.relieving.relief import reliefs
from mpt.planner.answers.plan import Growing, Plan, PlannedRanks, WithinBudget
from mpt.planner.device import routes
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import Gpu
from mpt.planner.facts.placement import Placement
from mpt.planner.step.moments import describe_moments
from mpt.planner.step.rank_trace import share_of, trace_rank
from mpt.planner.step.resume import describe_resume
from mpt.planner.step.run_fake import FakeRun, trace_config
from mpt.planner.trace import batch_fit
from mpt.planner.trace.overlap import OrderedWork, step_time
from mpt.planner.trace.replay import (
    Replay,
    fits_at_all_and_surely,
    peak_live,
    replay,
    split_at,
    timeline,
)
from mpt.planner.trace.snapshot import make_snapshot, write_snapshot
from mpt.planner.trace.trace import Trace, with_workspaces
from mpt.planner.trace.unseen import unseen_on
from mpt.seams import DataSpec

RETRACE_LIMIT = 4
"""Without a fit, the largest batch is looked for up to this multiple of the configured one, a trace at a time."""
RETRACED_EVENTS = 40_000
"""... and while the traces made for it come to no more than this together: two or three seconds."""
MODULES = 200
"""The number of modules that a plan lists with their bytes at the peak."""
HELD_THROUGHOUT = frozenset({"parameters", "gradients", "optimizer state", "buffers"})
"""Categories that no smaller batch, and nothing that is done to activations, makes smaller."""


@dataclass(frozen=True)
class Wish:
    """Further questions to a plan."""

    budget_bytes: int | None = None
    largest_batch: bool = False
    timeline: bool = False
    placement: dict[str, Any] = field(default_factory=dict)
    """The fields of `mpt.planner.facts.placement.Placement`; empty for a process alone."""
    whole_run: bool = False
    """Evaluation, samples and preview too, of a process alone."""
    draws: bool = False
    """Not to be planned if training could not draw a batch of data that are here, or would refuse `model.weights`."""
    budgets: Sequence[int] = ()
    """Budgets that the same trace is judged by too."""
    only_if_built_fits: bool = False
    """Not to be planned further than its networks if these alone exceed the budget."""
    snapshot: str = ""
    """A file for the planned timeline as a memory snapshot of torch; empty for none."""


def trace_placed(
    config: Config,
    data: DataSpec,
    gpu: Gpu,
    calibration: Calibration,
    placement: Placement,
    batch: int | None = None,
    whole_run: bool = False,
    most_built: int | None = None,
) -> FakeRun:
    """Trace a process alone, or one of several, at the configured batch or another one. Raises the errors of a plan."""
    unseen = unseen_on(gpu, calibration, config.train.deterministic)
    batch = batch or config.train.batch_size
    if placement.nproc > 1:
        return trace_rank(config, data, batch, gpu, unseen, placement)
    return trace_config(
        config, data, batch, gpu, unseen, whole_run=whole_run, most_built=most_built
    )


def plan_config(
    config: Config,
    data: DataSpec,
    gpu: Gpu,
    calibration: Calibration,
    wish: Wish,
    fake: FakeRun | None = None,
) -> Plan:
    """Plan a configuration; `fake` is its run if that is at hand. Raises CannotPlan, or the configuration's own
    errors.
    """
    started = time.perf_counter()
    batch_size = config.train.batch_size
    expandable = any(one.name in config.memory.tricks for one in reliefs("fragmentation"))
    placement = Placement(**wish.placement)
    cluster = placement.cluster(gpu)
    groups = placement.groups(config.parallel.shard, config.parallel.shard_ranks)
    communicators = sum(map(cluster.communicator_bytes, groups))
    context_bytes = calibration.context_bytes + communicators

    most = None
    if wish.only_if_built_fits and wish.budget_bytes is not None:
        most = max(wish.budget_bytes, *wish.budgets, 0) - context_bytes

    def trace(batch: int, whole_run: bool = False) -> FakeRun:
        return trace_placed(config, data, gpu, calibration, placement, batch, whole_run, most)

    fake = fake or trace(batch_size, wish.whole_run)
    plan = describe(
        fake,
        batch_size,
        gpu,
        calibration,
        wish,
        context_bytes,
        expandable,
        trace if placement.nproc == 1 else None,
    )
    if not isinstance(fake.work, OrderedWork):
        return replace(plan, planning_seconds=time.perf_counter() - started)
    times = step_time(fake.work, gpu, cluster, calibration.time_factor)
    ranks = PlannedRanks(
        nproc=placement.nproc,
        strategy=placement.strategy,
        network=cluster.network,
        per_machine=placement.per_machine,
        rank=placement.rank,
        words=placement.words,
        samples=share_of(placement, batch_size),
        host_bytes=fake.host_bytes,
        communicator_bytes=communicators,
        link=cluster.link,
        seconds=times.parts(),
    )
    elapsed = time.perf_counter() - started
    return replace(plan, step_seconds=times.total, ranks=ranks, planning_seconds=elapsed)


def describe(
    fake: FakeRun,
    batch_size: int,
    gpu: Gpu,
    calibration: Calibration,
    wish: Wish,
    context_bytes: int,
    expandable: bool,
    trace: Callable[[int], FakeRun] | None,
) -> Plan:
    """Return the plan of a traced step; `trace` traces it at another batch, if it can be."""
    capacity = None if wish.budget_bytes is None else max(0, wish.budget_bytes - context_bytes)
    free = replay(fake.trace, expandable=expandable)
    held_back = within(fake, free, wish.budget_bytes, context_bytes, expandable)
    split = split_at(fake.trace, free.peak_event, modules=MODULES)
    largest, surely, is_bound = None, None, False
    if wish.largest_batch and wish.budget_bytes is not None and trace is not None:
        largest, surely, is_bound = _largest_batches(
            fake, batch_size, trace, wish.budget_bytes, context_bytes, expandable
        )
    if wish.snapshot:
        fits_into = None if held_back.fits is not False else capacity
        write_snapshot(Path(wish.snapshot), make_snapshot(fake.trace, fits_into, expandable))
    pace = [] if fake.trace.is_recorded else fake.work.launch_notes(gpu)
    notes = [*fake.notes, *pace, *routes.unknown_routes()]
    return Plan(
        batch_size=batch_size,
        allocated=free.allocated,
        reserved=free.reserved,
        context_bytes=context_bytes,
        **vars(held_back),
        held_throughout=peak_live(fake.trace, categories=HELD_THROUGHOUT),
        by_category=split.by_category,
        by_module=split.by_module,
        moment=split.moment,
        largest_batch=largest,
        largest_surely=surely,
        largest_is_bound=is_bound,
        step_seconds=fake.work.seconds(gpu) * calibration.time_factor,
        host_bytes=fake.host_bytes,
        assumed_workspace=0
        if calibration.source
        else workspace_bytes(fake.trace, free.reserved, expandable),
        time_band=fake.work.band(gpu),
        notes=notes,
        inexact=fake.inexact,
        timeline=timeline(fake.trace) if wish.timeline else {},
        moments=describe_moments(fake.whole, fake.moments, free.reserved, capacity, expandable)
        | describe_resume(fake.resume, free.reserved, capacity, expandable),
        at_budgets={
            str(one): within(fake, free, one, context_bytes, expandable) for one in wish.budgets
        },
    )


def workspace_bytes(trace: Trace, reserved: int, expandable: bool = False) -> int:
    """Return how many bytes more than `reserved` are reserved if cuDNN gets the workspaces that it asks for."""
    if not trace.workspaces:
        return 0
    return max(0, replay(with_workspaces(trace), expandable=expandable).reserved - reserved)


def within(
    fake: FakeRun, free: Replay, budget_bytes: int | None, context_bytes: int, expandable: bool
) -> WithinBudget:
    """Judge a plan against a budget.

    `free` is the replay without a limit, which is the one within the budget too if there is room.
    """
    if budget_bytes is None:
        return WithinBudget(None, fits=None, tight=False, reserved_in_budget=free.reserved)
    capacity = max(0, budget_bytes - context_bytes)
    held_back = _held_back(fake, free, capacity, expandable)
    is_tight = held_back.fits and held_back.retries > 0
    growing = None
    if not expandable and (is_tight or not held_back.fits):
        grown = replay(fake.trace, expandable=True)
        grown_back = _held_back(fake, grown, capacity, True)
        growing = Growing(
            reserved=grown.reserved,
            reserved_in_budget=grown_back.reserved,
            fits=grown_back.fits,
            tight=grown_back.fits and grown_back.retries > 0,
        )
    return WithinBudget(budget_bytes, held_back.fits, is_tight, held_back.reserved, growing)


def _held_back(fake: FakeRun, unlimited: Replay, capacity: int, expandable: bool) -> Replay:
    if unlimited.reserved <= capacity:
        return unlimited
    return replay(fake.trace, capacity, expandable=expandable)


def _largest_batches(
    fake: FakeRun,
    batch_size: int,
    trace: Callable[[int], FakeRun],
    budget_bytes: int,
    context_bytes: int,
    expandable: bool,
) -> tuple[int, int | None, bool]:
    """Return the largest batch that fits or may fit, the largest that fits, and whether a larger one was not tried.

    The second is None if none was found before there were too many traces.
    """

    def judged(found: Trace, sizes: Sequence[int] | None = None) -> tuple[bool, bool]:
        return fits_at_all_and_surely(found, budget_bytes, context_bytes, sizes, expandable)

    second = trace(2 * batch_size).trace
    line = batch_fit.fit(fake.trace, batch_size, second, 2 * batch_size)
    answers = {batch_size: judged(fake.trace), 2 * batch_size: judged(second)}
    events, stopped = len(second.events), False

    def answer(batch: int) -> tuple[bool, bool]:
        nonlocal events, stopped
        if batch not in answers:
            if line is not None:
                answers[batch] = judged(line.trace, line.sizes(batch))
            elif batch > RETRACE_LIMIT * batch_size or events > RETRACED_EVENTS:
                stopped = True
                return False, False
            else:
                found = trace(batch).trace
                events += len(found.events)
                answers[batch] = judged(found)
        return answers[batch]

    most = batch_fit.largest_batch(lambda batch: answer(batch)[0], batch_size)
    is_bound, stopped = stopped, False
    surely: int | None = batch_fit.largest_batch(lambda batch: answer(batch)[1], batch_size, most)
    if stopped:
        surely = max((batch for batch, (_, is_sure) in answers.items() if is_sure), default=None)
    return most, surely, is_bound
