"""Worlds of many sizes out of two traces, if every rank has as many samples in each: `ddp`, the batch growing.

Such a rank starts the same operators in the same order in any world. Only tensors of the whole batch grow, and that
with the number of ranks, so two traces give every storage's and every operator's line, as for batch sizes
(`mpt.planner.trace.batch_fit`); the rest of a plan is replaying. If the two traces differ in anything else, each
world is traced. Under `fsdp` shards shrink as they are rounded, which is no line: those are always traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mpt.config.schema import Config
from mpt.planner.answers.plan import Plan
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import Gpu
from mpt.planner.facts.placement import Placement
from mpt.planner.plans.plan import Wish, plan_config, trace_placed
from mpt.planner.step.run_fake import FakeRun
from mpt.planner.trace import batch_fit
from mpt.planner.trace.overlap import Event, Operator, OrderedWork, Sent
from mpt.planner.trace.trace import Trace
from mpt.seams import DataSpec

GROWING = ("flops", "moved", "count", "size")
"""Properties of an operator or a collective that may differ between two worlds."""


def plan_worlds(
    config: Config,
    data: DataSpec,
    gpu: Gpu,
    calibration: Calibration,
    wish: Wish,
    sizes: Sequence[int],
) -> list[Plan]:
    """Plan a rank in worlds of these sizes, ascending. `config` has the batch of the first. Raises the errors of a
    plan."""
    each = config.train.batch_size // sizes[0]

    def placed(size: int) -> tuple[Config, Wish]:
        train = config.train.model_copy(update={"batch_size": each * size})
        placement = replace(Placement(**wish.placement), nproc=size)
        return replace(config, train=train), replace(wish, placement=placement.as_data())

    def plan(size: int, fake: FakeRun | None = None) -> Plan:
        own, own_wish = placed(size)
        return plan_config(own, data, gpu, calibration, own_wish, fake)

    if len(sizes) < 3:
        return [plan(size) for size in sizes]
    traced = {}
    for size in sizes[:2]:
        own, own_wish = placed(size)
        traced[size] = trace_placed(own, data, gpu, calibration, Placement(**own_wish.placement))
    line = fit(traced[sizes[0]], sizes[0], traced[sizes[1]], sizes[1])
    return [
        plan(size, traced.get(size) or (line(size) if line is not None else None)) for size in sizes
    ]


def fit(
    first: FakeRun, first_size: int, second: FakeRun, second_size: int
) -> Callable[[int], FakeRun] | None:
    """Return a function from world size to run, or None if the two are not linear."""
    storages = batch_fit.fit(first.trace, first_size, second.trace, second_size)
    works = first.work, second.work
    if storages is None or not all(isinstance(work, OrderedWork) for work in works):
        return None
    ours, theirs = (work.events if isinstance(work, OrderedWork) else [] for work in works)
    if (
        len(ours) != len(theirs)
        or first.host_bytes != second.host_bytes
        or first.notes != second.notes
    ):
        return None
    if any(without_growth(a) != without_growth(b) for a, b in zip(ours, theirs, strict=True)):
        return None
    distance = second_size - first_size

    def moved_to(size: int, a: Event, b: Event) -> Event:
        if not isinstance(a, Operator | Sent):
            return a
        before, after = vars(a), vars(b)
        steps = {
            name: (after[name] - before[name]) / distance for name in GROWING if name in before
        }
        return replace(
            a,
            **{
                name: round(before[name] + step * (size - first_size))
                for name, step in steps.items()
            },
        )

    def at(size: int) -> FakeRun:
        assert isinstance(first.work, OrderedWork)
        sizes = storages.sizes(size)
        made = [
            replace(storage, size=own)
            for storage, own in zip(first.trace.storages, sizes, strict=True)
        ]
        trace = Trace(made, first.trace.events, first.trace.spans)
        work = OrderedWork(
            products_in_tf32=first.work.products_in_tf32,
            convolutions_in_tf32=first.work.convolutions_in_tf32,
            sent=first.work.sent,
            ranks=size,
            stride=first.work.stride,
        )
        work.host_bytes, work.host_compute_bytes = (
            first.work.host_bytes,
            first.work.host_compute_bytes,
        )
        for a, b in zip(ours, theirs, strict=True):
            event = moved_to(size, a, b)
            work.events.append(event)
            if isinstance(event, Operator):
                work.operators[event.flops, event.moved, event.unit] += event.share
        return replace(first, trace=trace, whole=trace, work=work)

    return at


def without_growth(event: object) -> tuple[object, ...]:
    """Return an event's part that is the same in every world."""
    return type(event), *(value for name, value in vars(event).items() if name not in GROWING)
