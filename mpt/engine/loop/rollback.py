"""Actions of the loop if a training cannot continue as it is: returns to an earlier state, changes something, or stops.

`mpt.engine.recovery.recovery` decides which of these; whatever is done is an event in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from mpt.engine.loop.training import Training
from mpt.engine.recovery import recovery
from mpt.engine.recovery.diagnosis import Finding, find_first_non_finite
from mpt.engine.recovery.recovery import Decision
from mpt.engine.recovery.smallest_list import SmallestList, list_that_makes_finite
from mpt.engine.step.step import Update, whole_batch
from mpt.errors import CheckpointError, NonFiniteError
from mpt.run.checkpoints import checkpoint
from mpt.run.checkpoints.retention import list_steps, set_aside_after
from mpt.seams import Batch, Phase, Run


def check_floor(training: Training, updates: dict[str, Update]) -> None:
    """Fall back or stop if a loss scale is at its floor and gradients still overflow."""
    run, decision = training.run, recovery.at_floor(training.run, updates)
    if decision.phase is None:
        return
    if keep_at_floor(training, decision, updates[decision.phase.name]):
        return
    if decision.action == "fall_back" and run.precision.fall_back(run.task):
        training.journal.warn(f"{decision.why}; going on in bfloat16 without scaling", "fall_back")
        return
    save_or_roll_back(training)
    training.saver.finish()
    recovery.stop(run, training.journal, decision.phase, updates[decision.phase.name], decision.why)


def keep_at_floor(training: Training, decision: Decision, done: Update) -> bool:
    """Keep modules that overflow in float32 and restart the scale, if `precision.auto_keep_fp32` is set."""
    run, phase = training.run, decision.phase
    assert phase is not None
    if not training.remedies.may_keep_more(run.config):
        return False
    batch = whole_batch(run, done)
    finding = blame(run, phase, batch)
    found = list_that_makes_finite(run, phase, batch, finding)
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


def blame(run: Run, phase: Phase, batch: Batch) -> Finding:
    """Repeat an update that was not finite under instruments; all ranks do, and the first one's word counts."""
    finding = find_first_non_finite(run, phase, batch)
    return run.world.ask(lambda: finding) if run.world.size > 1 else finding


def recover(training: Training, phase: Phase, done: Update, why: str) -> None:
    """Name the first value that was not finite, roll back, and make the configured changes before the next try."""
    run, step = training.run, training.progress.step
    batch = whole_batch(run, done)
    finding, found = blame(run, phase, batch), None
    if training.remedies.may_keep_more(run.config):
        # with the weights that it failed with
        found = list_that_makes_finite(run, phase, batch, finding)
    roll_back(training, f"{why}, first at {finding.text}")
    if found is not None:
        keep_more(training, found)
        return
    said = training.remedies.choose(training.train, step, training.rollbacks)
    if said:
        training.journal.warn(said, "remedy")


def save_or_roll_back(training: Training) -> bool:
    """Write a checkpoint and return True; if something in it is not finite, roll back instead and return False."""
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
    training.saver.finish()
    # if it collapses again, an older one is the next
    sound, training.recent.sound = training.recent.sound, None
    limit = world.tell(sound[0] if sound is not None else training.sound_step or 0)
    kept = world.ask(lambda: [one for one in list_steps(directory) if one <= limit])
    if sound is None and not kept:
        training.journal.event(
            "collapse", f"{why}; no state of step {limit} or before is kept to return to"
        )
        return False
    # a resume is not to continue from a collapsed state
    world.ask(lambda: set_aside_after(directory, limit))
    training.saver.newest = kept[-1] if kept else None
    go_back(training, why, sound[1] if sound is not None else None)
    training.journal.warn(training.remedies.halve_rates(training.train, step), "remedy")
    return True


def roll_back(training: Training, why: str) -> None:
    """Return to the newest state in memory, else to the newest whole checkpoint."""
    training.saver.finish()
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
        why = "; ".join([why, *loaded.notes])
    training.recent.forget_after(training.progress.step)
    training.remedies = remedies  # changes made since stay
    training.rollbacks += 1
    journal, now = training.journal, training.progress.step
    journal.recorder.truncate_after(now, keep_events=True)
    journal.event("rollback", f"{why}: rolled back from step {step} to {now}")
    journal.console.warning(
        f"{why}; rolled back to step {now} ({training.rollbacks} of {training.train.max_rollbacks})"
    )
