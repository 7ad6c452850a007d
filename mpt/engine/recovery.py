"""What the loop does when a step goes wrong: out of memory, NaN, a scale at its floor, a poisoned state.

Each recovery is an event in the log, each gives up after a bound, and none of them writes a checkpoint of broken state.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from mpt.engine.diagnosis import find_first_non_finite
from mpt.engine.state import capture_random, restore_random
from mpt.engine.step import Update, restore_buffers, update
from mpt.errors import CheckpointError, MemoryBudgetError, NonFiniteError
from mpt.run import checkpoint
from mpt.run.state_checks import first_non_finite
from mpt.seams import Batch, Phase

if TYPE_CHECKING:
    from mpt.engine.loop import Training

CPU_ALLOCATION_FAILED = "DefaultCPUAllocator: can't allocate memory"
FLOOR_PATIENCE = 3
SKIP_PATIENCE = 10


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is an allocator's refusal, on a GPU or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or CPU_ALLOCATION_FAILED in str(error)


def update_with_memory_ladder(training: Training, phase: Phase, batch: Batch) -> Update:
    """Perform an update; out of memory, halve the micro-batch and repeat it with the same random numbers.

    The effective batch and the result stay the same but for BatchNorm, which sees smaller batches. Raises
    MemoryBudgetError at a micro-batch of 1, or at once where neither `memory.micro_batch: auto` nor `memory.on_oom:
    adapt` allows it.
    """
    run = training.run
    if not run.micro_batch_auto:
        try:
            return update(run, phase, batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).split("\n")[0]
        raise MemoryBudgetError(memory_card(training, phase, reason))
    random_state = capture_random(run.device)
    while True:
        try:
            return update(run, phase, batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).split("\n")[0]
        size = run.micro_batch_size or len(next(iter(batch.values())))
        if size == 1:
            raise MemoryBudgetError(memory_card(training, phase, reason))
        phase.optimizer.zero_grad(set_to_none=True)
        phase.module.zero_grad(set_to_none=True)
        restore_buffers(run)
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        restore_random(random_state, run.device)
        run.micro_batch_size = max(1, size // 2)
        message = f"{phase.name}: out of memory; micro-batch {size} -> {run.micro_batch_size}, batch as before"
        training.event("out_of_memory", message, phase=phase.name, micro_batch=run.micro_batch_size)
        training.console.warning(message)


def memory_card(training: Training, phase: Phase, reason: str) -> str:
    """Return what to tell the user when memory ran out for good."""
    run = training.run
    size = run.micro_batch_size or training.train.batch_size
    advice = (
        "a micro-batch of 1 is too much already: try memory.recompute, a half-precision mode or a smaller model"
        if size == 1
        else f"try memory.micro_batch={max(1, size // 2)} or memory.on_oom=adapt (same effective batch)"
    )
    return f"out of memory in phase {phase.name} at step {training.step} ({reason}); {advice}"


def handle_non_finite(training: Training, phase: Phase, batch: Batch) -> bool:
    """Act on a NaN or infinite loss as `train.on_non_finite` says. Return True when the run was rolled back.

    Raises NonFiniteError with the first bad module and operator when told to stop, or when recovery did not help.
    """
    policy = training.train.on_non_finite
    training.event("non_finite", f"{phase.name}: the loss is not finite at step {training.step}", phase=phase.name)
    poisoned = first_non_finite(
        {n: training.run.precision.module_state(m) for n, m in training.run.task.trainable.items()}
    )
    if policy == "skip" and poisoned is None:
        training.non_finite_in_a_row += 1
        if training.non_finite_in_a_row <= SKIP_PATIENCE:
            return False
        stop(training, phase, batch, f"{SKIP_PATIENCE} steps in a row were not finite")
    if policy == "stop" or training.rollbacks >= training.train.max_rollbacks:
        after = f" after {training.rollbacks} rollbacks" if training.rollbacks else ""
        stop(training, phase, batch, f"the loss of {phase.name} is not finite at step {training.step}{after}")
    return roll_back(training, f"{phase.name} was not finite at step {training.step}")


def roll_back(training: Training, why: str) -> bool:
    """Return to the newest whole checkpoint. The metrics written since then are dropped, the events stay."""
    try:
        loaded = checkpoint.load(training.directory, map_location=training.run.device)
    except CheckpointError as error:
        raise NonFiniteError(f"{why}, and there is no checkpoint to return to") from error
    rollbacks, step = training.rollbacks + 1, training.step
    training.load(loaded)
    training.rollbacks = rollbacks
    training.recorder.truncate_after(training.step, keep_events=True)
    training.event("rollback", f"{why}: rolled back from step {step} to {training.step}")
    training.console.warning(
        f"{why}; rolled back to step {training.step} ({rollbacks} of {training.train.max_rollbacks})"
    )
    return True


def stop(training: Training, phase: Phase, batch: Batch, why: str) -> None:
    """Raise NonFiniteError naming the first bad module and operator."""
    culprit = find_first_non_finite(training.run, phase, batch)
    training.event("stopped", f"{why}; first at {culprit}")
    raise NonFiniteError(
        f"{why}. First bad value: {culprit}. Try a lower optimizer.lr, optimizer.clip_grad_norm=1, or precision=fp32"
    )


def check_floor(training: Training, batch: Batch) -> None:
    """Act when a scale sits at its floor and still overflows: stop, or fall back, as `precision.at_min_scale` says."""
    run = training.run
    for phase in run.phases:
        scaler = getattr(run.precision, "scalers", {}).get(phase.name)
        if scaler is None or scaler.overflows_at_floor < FLOOR_PATIENCE:
            continue
        why = f"{phase.name}: gradients overflow at the smallest loss scale, {scaler.scale:g}"
        if run.config.precision.settings.at_min_scale == "fall_back" and run.precision.fall_back(run.task):
            run.scaled_phases = frozenset()
            training.event("fall_back", f"{why}; going on in bfloat16 without scaling")
            training.console.warning(f"{why}; going on in bfloat16 without scaling")
            return
        training.save()
        stop(training, phase, batch, why)


def refuse_poisoned_state(training: Training, bad: str) -> None:
    """Refuse to save a state with NaN in it: roll back while that is allowed, else stop with exit 6."""
    training.event("poisoned", f"{bad} is not finite at step {training.step}: not saved")
    if training.train.on_non_finite == "rollback" and training.rollbacks < training.train.max_rollbacks:
        roll_back(training, f"{bad} is not finite")
        return
    raise NonFiniteError(
        f"{bad} is not finite at step {training.step}; it was not saved, and the last good checkpoint is kept. "
        "Go on from it with --resume and a lower optimizer.lr"
    )
