"""The training loop: step, log, evaluate, sample, save, stop; every side job is a visible line.

Position in the data, learning rate and sample order are pure functions of the step, so resuming is restoring tensors
and counting on. Losses leave the device only when a line is logged.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor

from mpt.engine import recovery
from mpt.engine.diagnosis import Finding, find_first_non_finite
from mpt.engine.memory import TRACKED_STEP, CudaPeaks, known_tensors
from mpt.engine.progress import due
from mpt.engine.recovery import Decision
from mpt.engine.smallest_list import SmallestList, list_that_makes_finite
from mpt.engine.step import Update
from mpt.engine.summary import write_summary
from mpt.engine.training import Training
from mpt.errors import CheckpointError, NonFiniteError
from mpt.run import checkpoint
from mpt.run.memory_meter import MemoryMeter
from mpt.run.retention import list_steps, set_aside_after
from mpt.run.signals import Hurried, StopRequest
from mpt.seams import NOTHING, Batch, Phase, Run


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
            training.settle()
        raise


def take_steps(training: Training, stop: StopRequest, stop_after: int | None) -> None:
    """Do what `fit` promises, but for a checkpoint that is being written when something is raised."""
    progress, settings = training.progress, training.train
    end = min(training.total_steps, stop_after or training.total_steps)
    world = training.run.world
    try:
        begin(training)
    except Hurried:
        raise_unsaved(training, stop)
    stream = training.stream()
    window_started, window_start = time.perf_counter(), progress.step
    while progress.step < end and not training.stops_early:
        if not advance_to(training, stop, stream, min(training.next_side_job(), end)):
            stream = training.stream()  # rolled back: go on from the restored step
            window_started, window_start = time.perf_counter(), progress.step
            continue
        if due(progress.step, training.recent.every):
            training.keep_recent()
        if due(progress.step, settings.log_every) or progress.step == end:
            training.log(window_started, progress.step - window_start)
            window_started, window_start = time.perf_counter(), progress.step
        side_jobs_started = time.perf_counter()
        training.look_at_samples()
        evaluates = progress.step == training.total_steps or due(progress.step, settings.evaluate_every)
        samples = due(progress.step, settings.sample_every)
        if evaluates or samples:
            with contextlib.suppress(Hurried):  # the step is whole and can be saved
                if evaluates:
                    training.evaluate()
                if samples or training.is_over:
                    training.write_preview()
        if training.collapse is not None and return_from_collapse(training):
            stream = training.stream()
            window_started, window_start = time.perf_counter(), progress.step
            continue
        signal_number = world.agreed_stop(stop)
        ends = progress.step == end or training.stops_early
        if due(progress.step, settings.checkpoint_every) or ends or signal_number is not None:
            with stop.undisturbed():
                saved = save(training)
                if ends or signal_number is not None:
                    training.finish_saving()
            if not saved:  # the state was poisoned and the run rolled back
                stream = training.stream()
                window_started, window_start = time.perf_counter(), progress.step
                continue
        if signal_number is not None and not ends:
            training.list_skipped_files()
            write_summary(training)
            stop.signal_number = signal_number  # which another rank may have received
            stop.raise_if_requested(f"Step {progress.step} is saved; go on with --resume.")
        window_started += time.perf_counter() - side_jobs_started  # throughput is that of training alone
    training.tell_early_end()
    training.list_skipped_files()
    if training.step_seconds:
        write_summary(training)


def advance_to(training: Training, stop: StopRequest, stream: Iterator[Batch], goal: int) -> bool:
    """Perform the steps up to `goal`, or up to a signal. Return False when the run was rolled back meanwhile."""
    progress, world, step_seconds = training.progress, training.run.world, training.step_seconds
    console = training.journal.console
    while progress.step < goal:
        started = time.perf_counter()
        world.note_step(progress.step)
        if training.saver.writing is not None:
            training.note_saved()
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
    stop.raise_if_requested(f"Step {step + 1} took too long to be waited for; go on from the last checkpoint.")
    raise AssertionError("only a signal hurries")


def begin(training: Training) -> None:
    """Do what comes before the first step: a state to roll back to, and what all later samples are compared with."""
    if training.progress.step != 0:
        return
    if "rollback" in (training.train.on_non_finite, training.train.on_collapse):
        save(training)
        training.peaks = CudaPeaks()  # what this save reserved is the steps' to use
    if training.train.sample_every:
        training.write_preview()


def advance(training: Training, batch: Batch) -> bool:
    """Perform one step of every phase that is due. Return False when the run was rolled back instead."""
    training.set_learning_rates()
    run, progress, step = training.run, training.progress, training.progress.step
    if step in training.remedies.skipped_batches:
        training.journal.event("skipped_batch", f"the batch of step {step} was passed over")
        return True
    phases = [phase for phase in run.phases if phase.is_due(step)]
    updates = measured(training, phases, batch) if progress.unmeasured else perform(training, phases, batch)
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
    meter = MemoryMeter(lambda: known_tensors(training.run), training.run.device) if tracks else None
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
    is_finite = True
    for phase in phases:
        done = updates[phase.name] = training.ladder.update(phase, batch)
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
    follow_step(training.run, progress.step, progress.step * training.train.batch_size)
    return updates


def follow_step(run: Run, step: int, samples_seen: int) -> None:
    """Let the task follow a finished step; ranks agree on what it counts before and after it acts on it."""
    if run.world.size == 1:
        run.task.after_step(step, samples_seen)
        return
    agree_on_notes(run)
    run.task.after_step(step, samples_seen)
    agree_on_notes(run)


def agree_on_notes(run: Run) -> None:
    """Give all ranks the mean of what the task counts of the samples it sees: running means, controllers."""
    state = run.task.state_dict().values()
    run.world.average([value for value in state if isinstance(value, Tensor) and value.is_floating_point()])


def check_floor(training: Training, updates: dict[str, Update]) -> None:
    """Fall back or stop where a loss scale is at its floor and gradients still overflow."""
    run, decision = training.run, recovery.at_floor(training.run, updates)
    if decision.phase is None:
        return
    if keep_at_floor(training, decision, updates[decision.phase.name]):
        return
    if decision.action == "fall_back" and run.precision.fall_back(run.task):
        run.scaled_phases = frozenset()
        training.journal.warn(f"{decision.why}; going on in bfloat16 without scaling", "fall_back")
        return
    save(training)
    training.finish_saving()
    recovery.stop(run, training.journal, decision.phase, updates[decision.phase.name], decision.why)


def keep_at_floor(training: Training, decision: Decision, done: Update) -> bool:
    """Keep what overflows in float32 and begin anew with the scale, where `precision.auto_keep_fp32` says so."""
    run, phase = training.run, decision.phase
    assert phase is not None
    if not training.remedies.may_keep_more(run.config):
        return False
    assert done.batch is not None
    finding = blame(run, phase, done)
    found = list_that_makes_finite(run, phase, done.batch, finding)
    if found is None:
        return False
    keep_more(training, found, f"{decision.why}, first at {finding.text}; ")
    scaler = run.precision.scalers[phase.name]
    scaler.scale, scaler.overflows_at_floor = run.config.precision.settings.init_scale, 0
    return True


def keep_more(training: Training, found: SmallestList, why: str = "") -> None:
    """Keep modules in float32 from now on, and say so."""
    said = training.remedies.keep_in_float32(training.run, found)
    training.journal.warn(why + said, "keep_fp32", modules=list(found.modules), trials=found.trials)


def blame(run: Run, phase: Phase, done: Update) -> Finding:
    """Repeat an update that was not finite under instruments; all ranks do, and the first one's word counts."""
    assert done.batch is not None
    finding = find_first_non_finite(run, phase, done.batch)
    return run.world.ask(lambda: finding) if run.world.size > 1 else finding


def recover(training: Training, phase: Phase, done: Update, why: str) -> None:
    """Name what was not finite first, roll back, and change what the settings say before the next try."""
    run, step = training.run, training.progress.step
    finding, found = blame(run, phase, done), None
    if training.remedies.may_keep_more(run.config):
        assert done.batch is not None
        found = list_that_makes_finite(run, phase, done.batch, finding)  # with the weights that it failed with
    roll_back(training, f"{why}, first at {finding.text}")
    if found is not None:
        keep_more(training, found)
        return
    said = training.remedies.choose(training.train, step, training.rollbacks)
    if said:
        training.journal.warn(said, "remedy")


def save(training: Training) -> bool:
    """Write a checkpoint and return True; where something in it is not finite, roll back instead and return False."""
    bad = training.save()
    if bad is None:
        return True
    step = training.progress.step
    training.journal.event("poisoned", f"{bad} is not finite at step {step}: not saved")
    decision = recovery.with_poisoned_state(training.run, bad, training.rollbacks)
    if decision.action == "stop":
        refuse(decision, step)
    roll_back(training, decision.why)
    return False


def refuse(decision: Decision, step: int) -> NoReturn:
    """Raise NonFiniteError for a state that is not to be saved."""
    raise NonFiniteError(
        f"{decision.why} is not finite at step {step}; it was not saved, and the last good checkpoint is kept. "
        "Go on from it with --resume and a lower optimizer.lr"
    )


def return_from_collapse(training: Training) -> bool:
    """Return to a state from before a collapse and halve the learning rates, as far as it is allowed; say whether."""
    why, training.collapse = training.collapse, None
    if why is None or training.rollbacks >= training.train.max_rollbacks:
        return False
    world, directory, step = training.run.world, training.directory, training.progress.step
    training.finish_saving()
    sound, training.recent.sound = training.recent.sound, None  # where it collapses again, an older one is the next
    limit = world.tell(sound[0] if sound is not None else training.sound_step or 0)
    kept = world.ask(lambda: [one for one in list_steps(directory) if one <= limit])
    if sound is None and not kept:
        training.journal.event("collapse", f"{why}; no state of step {limit} or before is kept to return to")
        return False
    world.ask(lambda: set_aside_after(directory, limit))  # a resume is not to go on from what has collapsed
    training.saver.newest = kept[-1] if kept else None
    go_back(training, why, sound[1] if sound is not None else None)
    training.journal.warn(training.remedies.halve_rates(training.train, step), "remedy")
    return True


def roll_back(training: Training, why: str) -> None:
    """Return to the newest state in memory, else to the newest whole checkpoint."""
    training.finish_saving()
    newest = training.saver.newest
    recent = training.recent.take(since=newest if newest is not None else -1)
    go_back(training, why, recent[1] if recent is not None else None)


def go_back(training: Training, why: str, state: Mapping[str, Any] | None) -> None:
    """Return to a state of this process, else to the newest whole checkpoint. The metrics written since then are
    dropped, the events stay.
    """
    step, remedies = training.progress.step, training.remedies
    if state is not None:
        training.put_back(state)
    else:
        try:
            loaded = checkpoint.load(training.directory, training.run.world)
        except CheckpointError as error:
            raise NonFiniteError(f"{why}, and there is no checkpoint to return to") from error
        training.load(loaded)
    training.recent.forget_after(training.progress.step)
    training.remedies = remedies  # what was changed since then stays changed
    training.rollbacks += 1
    journal, now = training.journal, training.progress.step
    journal.recorder.truncate_after(now, keep_events=True)
    journal.event("rollback", f"{why}: rolled back from step {step} to {now}")
    journal.console.warning(
        f"{why}; rolled back to step {now} ({training.rollbacks} of {training.train.max_rollbacks})"
    )
