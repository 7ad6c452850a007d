"""One configuration planned: what it allocates, whether it fits, where it goes, how long a step takes.

Traces once at the configured batch and, when the largest batch is asked for, once more at twice of it; everything
else is replaying. Runs inside the worker process (`mpt.plan.worker`); the result is plain data.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from mpt.config.schema import Config
from mpt.plan import batch_fit, routes
from mpt.plan.calibration import Calibration
from mpt.plan.gpus import Gpu
from mpt.plan.replay import replay, split_at, timeline
from mpt.plan.run_fake import FakeRun, trace_config
from mpt.plan.time_model import BAND
from mpt.plan.unseen import Unseen
from mpt.seams import DataSpec

RETRACE_LIMIT = 4
"""Without a fit, the largest batch is looked for up to this multiple of the configured one, a trace at a time."""
FEW_PARTS = 8


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
    by_category: dict[str, int]
    by_module: list[tuple[str, int]]
    moment: str
    largest_batch: int | None
    largest_is_bound: bool
    """True where the search stopped before it found a batch that does not fit."""
    step_seconds: float
    time_band: float
    notes: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)
    timeline: dict[str, list[int]] = field(default_factory=dict)
    planning_seconds: float = 0.0

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


def plan_config(config: Config, data: DataSpec, gpu: Gpu, calibration: Calibration, wish: Wish) -> Plan:
    """Plan a configuration. Raises CannotPlan, or the configuration's own errors."""
    started = time.perf_counter()
    batch_size = config.train.batch_size
    expandable = "expandable_segments" in config.memory.tricks
    capacity = None if wish.budget_bytes is None else max(0, wish.budget_bytes - calibration.context_bytes)

    def trace(batch: int) -> FakeRun:
        unseen = Unseen(gpu.capability, config.train.deterministic, calibration.context_bytes, calibration.cudnn_share)
        return trace_config(config, data, batch, gpu, unseen)

    fake = trace(batch_size)
    free = replay(fake.trace, expandable=expandable)
    within = replay(fake.trace, capacity, expandable=expandable) if capacity is not None else None
    split = split_at(fake.trace, free.peak_event)
    largest, is_bound = None, False
    if wish.largest_batch and capacity is not None:
        largest, is_bound = _largest_batch(fake, batch_size, trace, capacity, expandable)
    notes = [*fake.notes, *routes.unknown_routes()]
    if "compile" in config.memory.tricks:
        notes.append("compile: planned as the eager step; a compiled one usually needs less and runs faster")
    return Plan(
        batch_size=batch_size,
        allocated=free.allocated,
        reserved=free.reserved,
        context_bytes=calibration.context_bytes,
        budget_bytes=wish.budget_bytes,
        fits=None if within is None else within.fits,
        tight=within is not None and within.fits and within.retries > 0,
        reserved_in_budget=free.reserved if within is None else within.reserved,
        by_category=split.by_category,
        by_module=split.by_module,
        moment=split.moment,
        largest_batch=largest,
        largest_is_bound=is_bound,
        step_seconds=fake.work.seconds(gpu) * calibration.time_factor,
        time_band=BAND,
        notes=notes,
        inexact=fake.inexact,
        timeline=timeline(fake.trace) if wish.timeline else {},
        planning_seconds=time.perf_counter() - started,
    )


def _largest_batch(fake: FakeRun, batch_size: int, trace: Any, capacity: int, expandable: bool) -> tuple[int, bool]:
    """Return the largest batch that fits, and whether it is only a lower bound."""
    second = trace(2 * batch_size)
    line = batch_fit.fit(fake.trace, batch_size, second.trace, 2 * batch_size)
    if line is not None:
        return batch_fit.largest_batch(
            lambda batch: replay(line.trace, capacity, sizes=line.sizes(batch), expandable=expandable).fits, batch_size
        ), False
    if not replay(fake.trace, capacity, expandable=expandable).fits:
        return 0, False
    limit = RETRACE_LIMIT * batch_size
    found = batch_fit.largest_batch(
        lambda batch: batch <= limit and replay(trace(batch).trace, capacity, expandable=expandable).fits, batch_size
    )
    return found, found >= limit
