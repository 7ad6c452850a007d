"""The training loop: step, log, evaluate, sample, save, stop; every side job is a visible line.

Position in the data, learning rate and sample order are pure functions of the step, so resuming is restoring tensors
and counting on. Losses leave the device only when a line is logged.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator
from typing import NoReturn

from mpt.engine.loop.rollback import check_floor, recover, return_from_collapse, save_or_roll_back
from mpt.engine.loop.summary import write_summary
from mpt.engine.loop.training import Training
from mpt.engine.recovery import recovery
from mpt.engine.state.memory import TRACKED_STEP, AllocatorPeaks, known_tensors
from mpt.engine.state.moving_averages import follow_step
from mpt.engine.state.progress import due
from mpt.engine.step.step import Update
from mpt.run.process.memory_meter import MemoryMeter
from mpt.run.process.signals import Hurried, StopRequest
from mpt.seams import NOTHING, Batch, Phase


def fit(training: Training, stop: StopRequest, stop_after: int | None = None) -> None:
    """Train until `total_steps`, until evaluations get no better (`train.early_stopping`), or until `stop_after` or a
    signal, saving before each.

    Raises Interrupted after saving when a signal arrived, NonFiniteError and MemoryBudgetError when recovery failed. A
    checkpoint that is being written is there, whole, when this returns or raises.
    """
    try:
        take_steps(training, stop, stop_after)
    except BaseException:
        with stop.undisturbed():
            training.saver.settle()
        raise


class Window:
    """The steps since the last line of the log, which has their throughput: that of training alone."""

    def __init__(self, step: int) -> None:
        self.begin(step)

    def begin(self, step: int) -> None:
        """Begin anew after a step."""
        self.started, self.first = time.perf_counter(), step


def take_steps(training: Training, stop: StopRequest, stop_after: int | None) -> None:
    """Do the work of `fit`, but for a checkpoint that is being written when something is raised."""
    progress = training.progress
    end = min(training.total_steps, stop_after or training.total_steps)
    try:
        begin(training)
    except Hurried:
        raise_unsaved(training, stop)
    owed = progress.owes_evaluation
    if owed:
        judge_and_save(training, stop, Window(progress.step), end)
    stream, window = training.stream(), Window(progress.step)
    while progress.step < end and not training.stops_early:
        goal = min(training.next_side_job(), end)
        is_on_course = advance_to(training, stop, stream, goal) and do_side_jobs(
            training, stop, window, end
        )
        if not is_on_course:  # rolled back: go on from the restored step
            stream, window = training.stream(), Window(progress.step)
    training.tell_early_end()
    training.list_skipped_files()
    if training.step_seconds or owed:
        write_summary(training)


def do_side_jobs(training: Training, stop: StopRequest, window: Window, end: int) -> bool:
    """Log, evaluate, sample and save as far as it is due after this step. Return False when the run was rolled back.

    Raises Interrupted if a signal has arrived, after saving.
    """
    progress = training.progress
    if due(progress.step, training.recent.every):
        training.keep_recent()
    if due(progress.step, training.train.log_every) or progress.step == end:
        training.log(window.started, progress.step - window.first)
        window.begin(progress.step)
    return judge_and_save(training, stop, window, end)


def judge_and_save(training: Training, stop: StopRequest, window: Window, end: int) -> bool:
    """Do the side jobs after the line of the log, as far as they are due. Return False when the run was rolled back."""
    progress = training.progress
    started = time.perf_counter()
    training.look_at_samples()
    evaluates = evaluate_and_sample(training)
    if training.collapse is not None and return_from_collapse(training):
        return False
    signal_number = training.run.world.agreed_stop(stop)
    ends = progress.step == end or training.stops_early
    is_best = evaluates and progress.best_step == progress.step
    if (
        due(progress.step, training.periods.checkpoint)
        or is_best
        or ends
        or signal_number is not None
    ):
        with stop.undisturbed():
            saved = save_or_roll_back(training)
            if ends or signal_number is not None:
                training.saver.finish()
        if not saved:  # the state was poisoned and the run rolled back
            return False
    if signal_number is not None and not ends:
        training.list_skipped_files()
        write_summary(training)
        stop.signal_number = signal_number  # which another rank may have received
        resume = f"mpt train --resume {shlex.quote(str(training.directory.path))}"
        stop.raise_if_requested(f"Step {progress.step} is saved; continue with: {resume}")
    window.started += time.perf_counter() - started
    return True


def evaluate_and_sample(training: Training) -> bool:
    """Evaluate and write a preview as far as it is due after this step. Return whether an evaluation was."""
    step, periods = training.progress.step, training.periods
    evaluates = step == training.total_steps or due(step, periods.evaluate)
    samples = due(step, periods.sample)
    if not (evaluates or samples):
        return False
    failure = None
    try:
        with contextlib.suppress(Hurried):  # the step is whole and can be saved
            if evaluates:
                training.evaluate()
            if samples or training.is_over:
                training.write_preview()
    except (Exception, SystemExit) as error:
        failure = error
    try:
        training.run.world.share_failure(failure)
    except (Exception, SystemExit) as error:
        save_before_failing(training, error)
        raise
    return evaluates


def save_before_failing(training: Training, failure: BaseException) -> None:
    """Save the step whose evaluation or preview fails, in somebody's metric perhaps: it cost more than they do.

    Several processes save together, if they have met: all of them fail.
    """
    step, world = training.progress.step, training.run.world
    if world.size > 1 and failure is not world.shared_failure:
        return
    with contextlib.suppress(Exception, SystemExit):  # the failure itself is the one to be reported
        if training.save() is None:
            training.saver.finish()
            training.journal.say(f"step {step} is saved, without what fails; go on with --resume")


def advance_to(training: Training, stop: StopRequest, stream: Iterator[Batch], goal: int) -> bool:
    """Perform the steps up to `goal`, or up to a signal. Return False when the run was rolled back meanwhile."""
    progress, world, step_seconds = training.progress, training.run.world, training.step_seconds
    console, background = training.journal.console, training.saver.background
    while progress.step < goal:
        started = time.perf_counter()
        world.note_step(progress.step)
        if background.writing is not None:
            training.saver.note_written()
        try:
            if not advance(training, next(stream)):
                return False
        except Hurried:
            raise_unsaved(training, stop)
        progress.step += 1
        seconds = time.perf_counter() - started
        step_seconds.append(seconds)
        stop.expect(seconds)
        console.advance(progress.step)
        if world.agreed_stop(stop) is not None:
            return True
    return True


def raise_unsaved(training: Training, stop: StopRequest) -> NoReturn:
    """Say that a step was cut short. Raises Interrupted."""
    step = training.progress.step
    stop.raise_if_requested(
        f"Step {step + 1} took too long to be waited for; go on from the last checkpoint."
    )
    raise AssertionError("only a signal hurries")


def begin(training: Training) -> None:
    """Prepare the first step: a state to roll back to, and the samples that all later ones are compared with."""
    if training.progress.step != 0:
        return
    if "rollback" in (training.train.on_non_finite, training.train.on_collapse):
        save_or_roll_back(training)
        training.peaks = AllocatorPeaks()  # memory that this save reserved is the steps' to use
    if training.periods.sample:
        training.write_preview()


def advance(training: Training, batch: Batch) -> bool:
    """Perform one step of every phase that is due. Return False when the run was rolled back instead."""
    training.set_learning_rates()
    run, progress, step = training.run, training.progress, training.progress.step
    if step in training.remedies.skipped_batches:
        training.journal.event("skipped_batch", f"the batch of step {step} was passed over")
        return True
    phases = [phase for phase in run.phases if phase.is_due(step)]
    updates = (
        measured(training, phases, batch)
        if progress.unmeasured
        else perform(training, phases, batch)
    )
    if updates is None:
        return False
    for name, done in updates.items():
        training.count(name, done)
    if run.precision.scalers:
        check_floor(training, updates)
    return True


def measured(training: Training, phases: list[Phase], batch: Batch) -> dict[str, Update] | None:
    """Perform updates as `perform` does, and track the memory of a step of phases that were not tracked before."""
    progress, names = training.progress, {phase.name for phase in phases}
    tracks = training.whole_steps >= TRACKED_STEP and not progress.unmeasured.isdisjoint(names)
    meter = (
        MemoryMeter(lambda: known_tensors(training.run), training.run.device) if tracks else None
    )
    with meter or NOTHING:
        updates = perform(training, phases, batch)
    if updates is None or any(done.stats.skipped for done in updates.values()):
        return updates
    training.whole_steps += 1
    if meter is None:
        return updates
    progress.unmeasured -= names
    if meter.split.peak_bytes > progress.memory.get("peak_bytes", 0):
        progress.memory = {"kind": "tracked", **meter.split.to_record()}
    return updates


def perform(training: Training, phases: list[Phase], batch: Batch) -> dict[str, Update] | None:
    """Return the updates of some phases, or None when the run was rolled back."""
    progress = training.progress
    updates: dict[str, Update] = {}
    is_finite, is_logged = True, training.is_logged
    for phase in phases:
        weights_before = training.standstill.before(phase, progress.step)
        done = updates[phase.name] = training.ladder.update(phase, batch, is_logged=is_logged)
        if weights_before is not None:
            training.standstill.after(phase, progress.step, weights_before, done)
        if not done.finite:
            is_finite = False
            message = f"{phase.name}: the loss is not finite at step {progress.step}"
            training.journal.event("non_finite", message, phase=phase.name)
            training.non_finite_in_a_row += 1
            decision = recovery.after_non_finite(
                training.run, phase, progress.step, training.non_finite_in_a_row, training.rollbacks
            )
            if decision.action == "roll_back":
                recover(training, phase, done, decision.why)
                return None
            if decision.action == "stop":
                recovery.stop(training.run, training.journal, phase, done, decision.why)
    if is_finite:
        training.non_finite_in_a_row = 0
    follow_step(training.run, progress.step)
    return updates
