"""The run's own build and its own step, on fake tensors, with a recorder watching.

Nothing here knows a model, a precision mode or a memory trick: `mpt.engine.building.build.build_run` builds what `mpt
train` would build, `mpt.engine.step.step.update` performs what it would perform, and only the tensors are fake. Two
steps are traced, since the first has no optimizer state yet; every phase runs in both, so that a phase that comes
rarely is planned for; the time of a step includes such a phase by its share of the steps. As in the loop on a GPU, the
next batch is on the device already while one is used.

Must run in a process of its own: the fake device cannot be unregistered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mpt.config.schema import Config
from mpt.config.sizes import describe_bytes
from mpt.engine.building.build import build_run
from mpt.engine.state.moving_averages import follow_step
from mpt.engine.step.rank_inputs import gathers_inputs, inputs_of
from mpt.engine.step.step import update
from mpt.errors import MemoryBudgetError
from mpt.parallel.local import local
from mpt.parallel.world import ALONE, World
from mpt.planner.device import fake_device, routes
from mpt.planner.device.fake_mode import LeanFakeMode
from mpt.planner.facts.gpus import Gpu
from mpt.planner.step.compiled import compiling_on_fake
from mpt.planner.step.moments import Moment, trace_moments
from mpt.planner.step.ranks import PlannedRank
from mpt.planner.step.resume import Resume, outline, trace_resume
from mpt.planner.step.shard_trace import watch_shards
from mpt.planner.trace.cannot_plan import explained, reason_of
from mpt.planner.trace.overlap import OrderedWork
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.time_model import Work
from mpt.planner.trace.trace import Trace
from mpt.planner.trace.unseen import Unseen
from mpt.planner.trace.watched_run import watch_run
from mpt.seams import NOTHING, Batch, DataSpec, Phase, Run

STEPS = 2


@dataclass
class FakeRun:
    """The trace of two fake steps."""

    trace: Trace
    work: Work
    notes: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)
    """Names of the tricks whose gradients are not bit-equal to the run without them."""
    whole: Trace = field(default_factory=Trace)
    """The steps and then `moments`."""
    moments: list[Moment] = field(default_factory=list)
    host_bytes: int = 0
    """Weights, gradients and optimizer states in host memory after the steps, and the bytes that memory tricks hold
    there."""
    resume: Resume | None = None
    """Of a whole run that trains in one process."""


def trace_config(
    config: Config,
    data: DataSpec,
    batch_size: int,
    gpu: Gpu,
    unseen: Unseen | None,
    device: torch.device | None = None,
    batch_ahead: bool = True,
    world: World = ALONE,
    work: Work | None = None,
    whole_run: bool = False,
    most_built: int | None = None,
) -> FakeRun:
    """Build and step a config on a fake GPU, or on fake tensors of another device.

    `batch_ahead`: the next batch is on the device while one is used, as the loop has it on a GPU and not on a CPU.
    `world`: the rank that is planned (`mpt.planner.step.ranks`); `batch_size` is of all of them together. `work` is
    the unit that operators are counted in.

    `whole_run`: the moments outside its steps are traced after them (`mpt.planner.step.moments`). `most_built`: bytes
    that a built run may hold at most; one that holds more is not stepped.

    Raises CannotPlan with module and line, and MemoryBudgetError for a run that holds more than `most_built`; the
    config's own errors pass.
    """
    device = device or fake_device.fake_gpu()
    work = Work() if work is None else work
    watching = {"work": False}

    def observe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if watching["work"]:
            work.observe(func, args, kwargs, result, recorder.outcome)

    def on_step(step: int) -> None:
        watching["work"] = step == STEPS - 1
        if isinstance(work, OrderedWork):
            work.is_noted = watching["work"]

    def on_phase(phase: Phase | None) -> None:
        work.share = 1.0 if phase is None else 1.0 / phase.every

    recorder = Recorder(device.type, unseen, observe)
    if isinstance(world, PlannedRank):
        world.mark = recorder.mark
        on_step(0)
    sharded = isinstance(world, PlannedRank) and world.is_sharded
    shards: AbstractContextManager[Any] = NOTHING
    if sharded and isinstance(work, OrderedWork):
        shards = watch_shards(recorder, work, device.type == "cpu")
    with on_fake_gpu(recorder, gpu, shards), compiling_on_fake(recorder) as compiled_notes:
        run = build_run(config, device, data, fake=True, world=world)
        check_built(recorder.trace, most_built)
        work.read_switches()
        work.products_in_tf32 |= run.precision.numerics.uses_tf32
        perform_steps(run, recorder, batch_size, on_step, on_phase, batch_ahead)
        steps, born = len(recorder.trace.events), len(recorder.trace.storages)
        on_host = host_bytes(run)
        on_step(STEPS)  # the rest is no step's work
        moments = list(trace_moments(run, recorder, batch_size, reason_of)) if whole_run else []
        saved = outline(run) if whole_run and world is ALONE else None
    whole = recorder.trace
    spans = [span for span in whole.spans if span.start < steps]
    notes = [
        note for note in [*run.notes, *compiled_notes] if fake_device.DEVICE not in note
    ]  # "has no such thing" is about the fake
    notes += recorder.notes
    inexact = [trick.name for trick in run.tricks if not trick.exact]
    asked = [one for one in whole.workspaces if one[0] <= steps]
    steps_alone = Trace(whole.storages[:born], whole.events[:steps], spans, asked)
    resume = None if saved is None else resumed(config, device, data, gpu, saved)
    return FakeRun(steps_alone, work, notes, inexact, whole, moments, on_host, resume)


def check_built(trace: Trace, most: int | None) -> None:
    """Raise MemoryBudgetError if a built run holds more than `most` bytes: no step takes that back."""
    if most is None:
        return
    live = sum(trace.storages[index].size for index in trace.live_at(len(trace.events)))
    if live > most:
        raise MemoryBudgetError(f"built, and before any step, it holds {describe_bytes(live)}")


def resumed(
    config: Config, device: torch.device, data: DataSpec, gpu: Gpu, saved: Mapping[str, Any]
) -> Resume:
    """Build the run again, as a process that resumes does, and put a checkpoint into it."""
    recorder = Recorder(device.type)

    def build() -> Run:
        return build_run(config, device, data, fake=True, restores=True)

    with on_fake_gpu(recorder, gpu), compiling_on_fake(recorder):
        return trace_resume(build, saved, recorder, reason_of)


def host_bytes(run: Run) -> int:
    """Return the bytes of a run's weights, gradients and optimizer states on the CPU, and of its tricks' there."""
    weights = [weight for module in run.task.modules.values() for weight in module.parameters()]
    held: list[Any] = [*weights, *(weight.grad for weight in weights)]
    for optimizer in run.optimizers.values():
        held += (value for state in optimizer.state.values() for value in state.values())
    parts = {
        id(part): part
        for part in map(local, (one for one in held if isinstance(one, Tensor) and one.dim()))
    }
    on_host = sum(part.nbytes for part in parts.values() if part.device.type == "cpu")
    return on_host + sum(trick.host_bytes for trick in run.tricks)


@contextmanager
def on_fake_gpu(
    recorder: Recorder, gpu: Gpu, outside: AbstractContextManager[Any] = NOTHING
) -> Iterator[None]:
    """Make tensors fake and record them, along the routes of a GPU; `outside` is entered before tensors are fake.

    Raises CannotPlan, with module and line, for a question that has no answer.
    """
    fake_device.register()
    routes.register()
    routes.target.capability = gpu.capability
    # what a model compiles itself, since a plan follows operators; memory.compile has a way of its own
    torch.compiler.set_stance("force_eager")
    fake_device.clear_weight_casts()
    # such as a constant that the model's file makes on import
    fake = LeanFakeMode(allow_non_fake_inputs=True)
    recorder.below = fake
    with (
        explained(recorder),
        outside,
        fake,
        torch.autograd.set_multithreading_enabled(False),
        recorder.recording(),
        fake_device.listen_to_casts(lambda cast: recorder.mark([cast], "cast cache")),
    ):
        yield


def perform_steps(
    run: Run,
    recorder: Recorder,
    batch_size: int,
    on_step: Callable[[int], Any] = lambda step: None,
    on_phase: Callable[[Phase | None], Any] = lambda phase: None,
    batch_ahead: bool = True,
) -> None:
    """Perform the traced steps of a built run, and report tensors' owners and the moment to the recorder."""
    with ExitStack() as stack:
        stack.enter_context(watch_run(run, recorder))

        start, stop = run.world.place(batch_size)
        gathers = gathers_inputs(run)

        def load() -> Batch:
            loaded = run.data.zeros(stop - start, run.device, stored=True)
            if not gathers:
                loaded = run.data.as_floats(loaded)
            recorder.mark(loaded.values(), "batch")
            return loaded

        def whole(loaded: Batch) -> Batch:
            if not gathers:
                return loaded
            gathered = inputs_of(run, loaded, batch_size)
            recorder.mark(gathered.values(), "whole batch")
            return gathered

        following = load() if batch_ahead else {}
        updates: dict[str, Any] = {}
        for step in range(STEPS):
            on_step(step)
            recorder.enter_moment(step, "", "loading")
            if batch_ahead:
                part, following = following, load()
            else:
                part = load()
            batch = whole(part)
            for phase in run.phases:
                on_phase(phase)
                recorder.enter_moment(step, phase.name, "forward")
                # The loop keeps the last losses until the next are there.
                updates[phase.name] = update(run, phase, batch)
            on_phase(None)
            recorder.enter_moment(step, "", "after the step")
            follow_step(run, step)
