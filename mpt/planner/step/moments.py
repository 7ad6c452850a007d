"""A run's work outside its steps, on the same fake tensors: an evaluation's batch, samples of its own, the preview.

Training that fits may still run out of memory after an epoch, when it evaluates: other layers' kernels, larger maps,
all of a batch at once if the steps took micro-batches. Each of these is run once after the traced steps, where the
optimizer's state and the memory that the allocator kept of the steps are there as well. Saving is the checkpoint's own
code, up to the host's copies; an export (`mpt convert`) builds the networks on the host and takes nothing of the
device. Values that are read meanwhile, as some metrics do, are taken to be zero, and that is reported
(`mpt.planner.device.zero_values`). The training's own batch, which stays on the device meanwhile, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mpt.engine.state.evaluation import apart_from_training, preview
from mpt.engine.state.state import capture
from mpt.planner.answers.plan import PlannedMoment
from mpt.planner.device.zero_values import values_as_zeros
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.repeated_calls import RepeatedCalls
from mpt.planner.trace.replay import peak_live, replay
from mpt.planner.trace.trace import Trace
from mpt.run.checkpoints.state_checks import first_non_finite
from mpt.run.process.storage_trace import tensors_in
from mpt.seams import Batch, Run, Samples
from mpt.seams.phase_losses import arithmetic_of
from mpt.seams.task_kinds import evaluation_samples

SAVING = "saving"
STATE = "optimizer state"


@dataclass(frozen=True)
class Moment:
    """One thing that was run after the steps: its events are `start` to `stop`, unless a problem stopped it."""

    name: str
    start: int
    stop: int
    problem: str = ""
    reads_values: bool = False


def trace_moments(
    run: Run, recorder: Recorder, batch_size: int, explain: Callable[[BaseException], str]
) -> Iterator[Moment]:
    """Run the moments outside the steps, one after the other, and yield the recorder's span of each."""
    works: dict[str, Callable[[], bool]] = {
        "evaluation": lambda: evaluate(run, load(run, batch_size)),
        "samples for the evaluation": lambda: make_samples(run, batch_size),
        "preview": lambda: preview(run, load(run, batch_size)) is not None,
        SAVING: lambda: save(run),
    }
    if not evaluation_samples(run.task):
        del works["samples for the evaluation"]
    for name, work in works.items():
        start, problem = len(recorder.trace.events), ""
        recorder.enter_moment(recorder.trace.spans[-1].step, "", name)
        repeated = RepeatedCalls(recorder)
        with repeated.repeating(), values_as_zeros(recorder) as values:
            try:
                is_done = work()
            except Exception as error:
                problem, is_done = explain(error), True
        for optimizer in run.optimizers.values():
            recorder.mark(tensors_in(list(optimizer.state.values())), STATE)
        if is_done:
            yield Moment(name, start, len(recorder.trace.events), problem, values.reads > 0)


def load(run: Run, batch_size: int) -> Batch:
    """Return a batch of the test data on the device."""
    return run.data.as_floats(run.data.zeros(batch_size, run.device, stored=True))


def evaluate(run: Run, batch: Batch) -> bool:
    """Evaluate one batch and take the evidence to the host, as `mpt.engine.state.evaluation.gather_evidence` does."""
    with apart_from_training(run), arithmetic_of(run):
        evidence = run.task.evaluate_batch(batch)
        for value in evidence.values():
            value.cpu()
    return True


def make_samples(run: Run, batch_size: int) -> bool:
    """Make the first samples of an evaluation."""
    assert isinstance(run.task, Samples)
    with apart_from_training(run), arithmetic_of(run):
        evidence = run.task.evaluate_samples(0, min(batch_size, run.task.evaluation_samples))
        for value in evidence.values():
            value.cpu()
    return True


def save(run: Run) -> bool:
    """Check that all weights are finite and take the state to the host, one tensor after the other."""
    state = capture(run)
    first_non_finite({"modules": state["modules"]})
    for value in tensors_in(state):
        value.detach().cpu()
    return True


def describe_moments(
    whole: Trace, moments: list[Moment], reserved: int, capacity: int | None, expandable: bool
) -> dict[str, PlannedMoment]:
    """Return for each moment its own peak, the allocator's bytes at its end, and whether that fits; or why not.

    Each is judged right after the steps, so that one that does not fit is not held against the next. `reserved` is what
    the allocator holds after those, with no limit.
    """
    found: dict[str, PlannedMoment] = {}
    if not moments:
        return found
    steps = moments[0].start
    for moment in moments:
        if moment.problem:
            found[moment.name] = PlannedMoment(problem=moment.problem)
            continue
        alone = after_steps(whole, steps, moment)
        played = replay(alone, expandable=expandable)
        fits = None
        # held back it takes another course only if there is too little room
        if capacity is not None:
            fits = (
                played.reserved <= capacity or replay(alone, capacity, expandable=expandable).fits
            )
        found[moment.name] = PlannedMoment(
            allocated=peak_from(alone, steps),
            reserved=played.reserved,
            grown=played.reserved - reserved,
            fits=fits,
            # whose check reads flags, which change nothing
            reads_values=moment.reads_values and moment.name != SAVING,
        )
    return found


def after_steps(whole: Trace, steps: int, moment: Moment) -> Trace:
    """Return the trace of the steps, which end at event `steps`, and one moment, without the moments before it.

    Except for the optimizer's state: once parked (`memory.park_optimizer`) it is in other memory.
    """
    own = whole.events[moment.start : moment.stop]
    between = {entry for entry in whole.events[steps : moment.start] if entry >= 0}
    moved = whole.live_at(steps - 1) ^ whole.live_at(moment.start - 1)
    state = sorted(one for one in moved if whole.storages[one].category == STATE)
    left = [one if one in between else ~one for one in state]
    dropped = between - set(state)
    kept = [entry for entry in own if (entry if entry >= 0 else ~entry) not in dropped]
    return Trace(whole.storages, [*whole.events[:steps], *sorted(left), *kept])


def peak_from(trace: Trace, start: int) -> int:
    """Return the most bytes alive from an event on."""
    born = trace.live_at(start - 1) if start else set()
    events = [*sorted(born), *trace.events[start:]]
    return peak_live(Trace(trace.storages, events, trace.spans))
