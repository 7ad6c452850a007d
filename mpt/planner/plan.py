"""One configuration planned: what it allocates, whether it fits, where it goes, how long a step takes.

Traces once at the configured batch and, when the largest batch is asked for, once more at twice of it; everything
else is replaying. That goes for growing segments too: they change where tensors lie and not which there are, so each
plan that is held back by its budget says what they would make of it. Runs inside the worker process
(`mpt.planner.worker`); the result is plain data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mpt.config.relief import reliefs
from mpt.config.schema import Config
from mpt.planner import batch_fit, releases, routes
from mpt.planner.calibration import Calibration
from mpt.planner.gpus import Gpu
from mpt.planner.moments import describe_moments
from mpt.planner.overlap import OrderedWork, step_time
from mpt.planner.placement import Placement
from mpt.planner.rank_trace import share_of, trace_rank
from mpt.planner.replay import Replay, fits_at_all_and_surely, peak_live, replay, split_at, timeline
from mpt.planner.run_fake import FakeRun, trace_config
from mpt.planner.time_model import BAND
from mpt.planner.trace import Trace
from mpt.planner.unseen import Unseen
from mpt.seams import DataSpec

RETRACE_LIMIT = 4
"""Without a fit, the largest batch is looked for up to this multiple of the configured one, a trace at a time."""
RETRACED_EVENTS = 40_000
"""... and while the traces made for it come to no more than this together: two or three seconds."""
MODULES = 200
"""So many modules are told what they hold at the peak."""
HELD_THROUGHOUT = frozenset({"parameters", "gradients", "optimizer state", "buffers"})
"""Categories that no smaller batch, and nothing that is done to activations, makes smaller."""


@dataclass(frozen=True)
class Plan:
    """Bytes throughout; `reserved` is the allocator's, the card also holds `context_bytes`."""

    batch_size: int
    allocated: int
    reserved: int
    context_bytes: int
    budget_bytes: int | None
    fits: bool | None
    """None without a budget."""
    tight: bool
    """It fits only by giving cached memory back to the driver in the middle of a step."""
    reserved_in_budget: int
    """What the allocator reserves when the budget holds it back; `reserved` without a budget."""
    held_throughout: int
    """The most that weights, gradients, optimizer state and buffers take together at any moment."""
    growing: dict[str, int | bool]
    """`reserved`, `reserved_in_budget`, `fits` and `tight` with `memory.expandable_segments`; empty without a budget,
    and where the plan fits without emptying the cache or has them already."""
    by_category: dict[str, int]
    by_module: list[tuple[str, int]]
    moment: str
    largest_batch: int | None
    """The largest that fits or may fit."""
    largest_surely: int | None
    """The largest of the class that fits (`mpt.planner.verdict`)."""
    largest_is_bound: bool
    """True where the search stopped before it found a batch that does not fit."""
    step_seconds: float
    time_band: float
    notes: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)
    timeline: dict[str, list[int]] = field(default_factory=dict)
    moments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the run does beside its steps: `allocated`, `reserved` and `grown` bytes and `fits`, or the `problem`."""
    planning_seconds: float = 0.0
    ranks: dict[str, Any] = field(default_factory=dict)
    """With several processes: which of them this is, what its communicators take (in `context_bytes`), and the parts of
    the step's time."""

    as_torch: dict[str, Any] = field(default_factory=dict)
    """The `release` of torch that was planned and its `routes`: the `words` and `source` of what it does otherwise."""
    at_budgets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What else is in `Wish.budgets`, in bytes as text -> the fields of this plan that depend on the budget."""

    @property
    def total(self) -> int:
        """Bytes taken from the card."""
        return self.reserved + self.context_bytes


@dataclass(frozen=True)
class Wish:
    """What is to be planned beside the peak."""

    budget_bytes: int | None = None
    largest_batch: bool = False
    timeline: bool = False
    placement: dict[str, Any] = field(default_factory=dict)
    """The fields of `mpt.planner.placement.Placement`; empty for a process alone."""
    whole_run: bool = False
    """Evaluation, samples and preview too, of a process alone."""
    budgets: Sequence[int] = ()
    """Budgets that the same trace is judged by too."""
    torch: str | None = None
    """The release of torch to plan for (`mpt.planner.releases`); None for the installed one."""


def plan_config(
    config: Config, data: DataSpec, gpu: Gpu, calibration: Calibration, wish: Wish, fake: FakeRun | None = None
) -> Plan:
    """Plan a configuration; `fake` is its run where that is at hand. Raises CannotPlan, or the configuration's own
    errors.
    """
    release = None if wish.torch is None else releases.parse_release(wish.torch)
    with releases.planning_as(release):
        plan = _plan(config, data, gpu, calibration, wish, fake)
    if release is None:
        return plan
    taken = [{"words": route.words, "source": route.source} for route in releases.taken_routes()]
    return replace(plan, as_torch={"release": releases.show(release), "routes": taken})


def trace_placed(
    config: Config,
    data: DataSpec,
    gpu: Gpu,
    calibration: Calibration,
    placement: Placement,
    batch: int | None = None,
    whole_run: bool = False,
) -> FakeRun:
    """Trace a process alone, or one of several, at the configured batch or another one. Raises what a plan raises."""
    unseen = Unseen(gpu.capability, config.train.deterministic, calibration.context_bytes, calibration.cudnn_share)
    batch = batch or config.train.batch_size
    if placement.nproc > 1:
        return trace_rank(config, data, batch, gpu, unseen, placement)
    return trace_config(config, data, batch, gpu, unseen, whole_run=whole_run)


def _plan(config: Config, data: DataSpec, gpu: Gpu, calibration: Calibration, wish: Wish, fake: FakeRun | None) -> Plan:
    started = time.perf_counter()
    batch_size = config.train.batch_size
    expandable = any(one.name in config.memory.tricks for one in reliefs("fragmentation"))
    placement = Placement(**wish.placement)
    cluster = placement.cluster(gpu)
    groups = placement.groups(config.parallel.shard, config.parallel.shard_ranks)
    communicators = sum(map(cluster.communicator_bytes, groups))
    context_bytes = calibration.context_bytes + communicators
    capacity = None if wish.budget_bytes is None else max(0, wish.budget_bytes - context_bytes)

    def trace(batch: int, whole_run: bool = False) -> FakeRun:
        return trace_placed(config, data, gpu, calibration, placement, batch, whole_run)

    fake = fake or trace(batch_size, wish.whole_run)
    free = replay(fake.trace, expandable=expandable)
    held_back = within(fake, free, wish.budget_bytes, context_bytes, expandable)
    split = split_at(fake.trace, free.peak_event, modules=MODULES)
    largest, surely, is_bound = None, None, False
    if wish.largest_batch and wish.budget_bytes is not None and placement.nproc == 1:
        largest, surely, is_bound = _largest_batches(
            fake, batch_size, trace, wish.budget_bytes, context_bytes, expandable
        )
    notes = [*fake.notes, *routes.unknown_routes()]
    step_seconds, ranks = fake.work.seconds(gpu) * calibration.time_factor, {}
    if isinstance(fake.work, OrderedWork):
        times = step_time(fake.work, gpu, cluster, calibration.time_factor)
        step_seconds = times.total
        ranks = {
            **asdict(placement),
            "words": placement.words,
            "samples": share_of(placement, batch_size),
            "host_bytes": fake.host_bytes,
            "communicator_bytes": communicators,
            "network": cluster.network,
            "link": cluster.link,
            "seconds": times.as_data(),
        }
    return Plan(
        batch_size=batch_size,
        allocated=free.allocated,
        reserved=free.reserved,
        context_bytes=context_bytes,
        **held_back,
        held_throughout=peak_live(fake.trace, categories=HELD_THROUGHOUT),
        by_category=split.by_category,
        by_module=split.by_module,
        moment=split.moment,
        largest_batch=largest,
        largest_surely=surely,
        largest_is_bound=is_bound,
        step_seconds=step_seconds,
        time_band=BAND,
        notes=notes,
        inexact=fake.inexact,
        timeline=timeline(fake.trace) if wish.timeline else {},
        moments=describe_moments(fake.whole, fake.moments, free.reserved, capacity, expandable),
        planning_seconds=time.perf_counter() - started,
        ranks=ranks,
        at_budgets={str(one): within(fake, free, one, context_bytes, expandable) for one in wish.budgets},
    )


def within(
    fake: FakeRun, free: Replay, budget_bytes: int | None, context_bytes: int, expandable: bool
) -> dict[str, Any]:
    """Return what a plan says about a budget: `budget_bytes fits tight reserved_in_budget growing`.

    `free` is the replay without a limit, which is the one within the budget too where there is room.
    """
    found: dict[str, Any] = {
        "budget_bytes": budget_bytes, "fits": None, "tight": False, "reserved_in_budget": free.reserved, "growing": {}
    }  # fmt: skip
    if budget_bytes is None:
        return found
    capacity = max(0, budget_bytes - context_bytes)

    def held_back(unlimited: Replay, grows: bool) -> dict[str, int | bool]:
        has_room = unlimited.reserved <= capacity
        played = unlimited if has_room else replay(fake.trace, capacity, expandable=grows)
        tight = played.fits and played.retries > 0
        return {"reserved_in_budget": played.reserved, "fits": played.fits, "tight": tight}

    found |= held_back(free, expandable)
    if not expandable and (found["tight"] or not found["fits"]):
        grown = replay(fake.trace, expandable=True)
        found["growing"] = {"reserved": grown.reserved, **held_back(grown, True)}
    return found


def _largest_batches(
    fake: FakeRun,
    batch_size: int,
    trace: Callable[[int], FakeRun],
    budget_bytes: int,
    context_bytes: int,
    expandable: bool,
) -> tuple[int, int, bool]:
    """Return the largest batch that fits or may fit, the largest that fits, and whether a larger one was not tried."""

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
    is_bound = stopped
    return most, batch_fit.largest_batch(lambda batch: answer(batch)[1], batch_size, most), is_bound
