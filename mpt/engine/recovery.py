"""What the loop does when a step goes wrong: out of memory, NaN, a scale at its floor, a poisoned state.

Each recovery is an event in the log, each gives up after a bound, and none of them writes a checkpoint of broken state.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointError as RecomputationError

from mpt.config.relief import splitter
from mpt.engine import ladder
from mpt.engine.diagnosis import find_first_non_finite
from mpt.engine.state import capture_random, restore_random
from mpt.engine.step import Update, restore_buffers, update
from mpt.errors import CheckpointError, ConfigError, MemoryBudgetError, NonFiniteError
from mpt.run import checkpoint
from mpt.run.state_checks import first_non_finite
from mpt.seams import Batch, Phase

if TYPE_CHECKING:
    from mpt.engine.loop import Training
    from mpt.seams import Run

REFUSALS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",  # the driver's, for pinned memory, kernels and handles
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN and cuSOLVER
    "was unable to find an engine to execute this computation",  # cuDNN: no kernel's workspace had room
)
"""What a refusal says that is no torch.OutOfMemoryError."""
FLOOR_PATIENCE = 3
SKIP_PATIENCE = 10


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is a refusal of memory: by torch's allocators, the driver or CUDA's libraries."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in REFUSALS)


def out_of_memory_reason(error: BaseException) -> str:
    """Return an allocator's message without its advice."""
    return str(error).strip().split("\n")[0].split(". Of the allocated memory")[0]


def update_with_memory_ladder(training: Training, phase: Phase, batch: Batch) -> Update:
    """Perform an update; out of memory, make one move on the ladder (`mpt.engine.ladder`) and repeat it.

    The repeated update sees the same batch, random numbers, buffers and notes of the task; the effective batch and the
    result stay the same but for BatchNorm, which sees smaller batches. Raises MemoryBudgetError when no move is left,
    when the optimizer had begun to step, or at once where neither `memory.micro_batch: auto` nor `memory.on_oom: adapt`
    allows to go on.
    """
    run = training.run
    random_state = capture_random(run.device) if run.micro_batch_auto else {}
    notes = run.task.snapshot() if run.micro_batch_auto else {}
    refused: dict[str, str] = {}
    trial: Trial | None = None
    while True:
        steps = noted_steps(training, phase.optimizer)
        steps.clear()
        try:
            return update(run, phase, batch)
        except (RuntimeError, ConfigError) as error:
            unsuited = trial is not None and isinstance(error, ConfigError | RecomputationError) and not steps
            if not unsuited and not is_out_of_memory(error):
                raise
            reason = out_of_memory_reason(error)
        # Past the except block: the traceback holds the tensors that were too many.
        if unsuited:
            assert trial is not None
            trial.take_back()
            refused[trial.name] = reason
            tell(training, phase, f"{trial.name} cannot be used here ({reason})")
        if steps or not run.micro_batch_auto:
            fail(training, phase, reason, refused, bool(steps))
        undo_update(run, phase, random_state, notes)
        notes = run.task.snapshot()
        trial = climb(training, phase, refused)
        if trial is None:
            fail(training, phase, reason, refused, False)


def noted_steps(training: Training, optimizer: Optimizer) -> list[int]:
    """Return the list that grows when this optimizer begins to step: from then on an update cannot be repeated.

    The hook is put on once, not in every step.
    """
    steps = training.steps_begun.get(optimizer)
    if steps is None:
        steps = training.steps_begun[optimizer] = []
        optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    return steps


@dataclass(frozen=True)
class Trial:
    """A move that was made, and the way back from it."""

    name: str
    take_back: Callable[[], None]


def undo_update(run: Run, phase: Phase, random_state: dict[str, Any], notes: dict[str, Any]) -> None:
    """Put everything back as it was before an update in which no parameter has stepped."""
    phase.optimizer.zero_grad(set_to_none=True)
    phase.module.zero_grad(set_to_none=True)
    restore_buffers(run)
    run.task.restore(notes)
    for trick in run.tricks:
        trick.abandon(phase)
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    restore_random(random_state, run.device)


def climb(training: Training, phase: Phase, refused: dict[str, str]) -> Trial | None:
    """Make the next move that can be made, and say which; return None when none is left."""
    run = training.run
    whole = run.config.memory.on_oom == "adapt"
    before = ladder.micro_batch_size(ladder.adapted_config(run))
    for name, value in ladder.next_moves(ladder.adapted_config(run), whole, ladder.least_size(run)):
        if name in refused:
            continue
        try:
            take_back = ladder.move(run, name, value)
        except ConfigError as error:
            refused[name] = str(error).split("\n")[0]
            if name != splitter():
                tell(training, phase, f"{name} cannot be used here ({refused[name]})")
            continue
        what = f"micro-batch {before} -> {value}" if name == splitter() else f"memory.{name}={value} from here on"
        sees = f"; BatchNorm sees {value} samples" if name == splitter() and ladder.has_batch_norm(run) else ""
        tell(training, phase, f"{what}, batch as before{sees}")
        return Trial(name, take_back)
    return None


def tell(training: Training, phase: Phase, what: str) -> None:
    """Record and show what was done about memory."""
    message = f"{phase.name}: out of memory; {what}"
    size = ladder.micro_batch_size(ladder.adapted_config(training.run))
    adapted = dict(training.run.adapted)
    training.event("out_of_memory", message, phase=phase.name, micro_batch=size, adapted=adapted)
    training.console.warning(message)


def fail(training: Training, phase: Phase, reason: str, refused: dict[str, str], stepping: bool) -> NoReturn:
    """Raise MemoryBudgetError with what to try."""
    run = training.run
    size = ladder.micro_batch_size(ladder.adapted_config(run))
    smaller = "a half-precision mode or a smaller model"
    if stepping:
        advice = (
            "the optimizer had begun to step, so the update cannot be repeated, and micro-batches do not make a step "
            f"smaller: try memory.cpu_optimizer=true, {smaller}"
        )
    elif not run.micro_batch_auto and size > 1:
        advice = f"try memory.{splitter()}={size // 2} or memory.on_oom=adapt (same effective batch)"
    elif size == 1:
        used = {**run.adapted, **run.config.memory.tricks}
        unused = (
            f"memory.{one.name}, "
            for one in ladder.later_tricks()
            if one.name not in used and not ladder.pointless(one.name, run.device)
        )
        advice = f"a micro-batch of 1 is too much already: try {next(unused, '')}{smaller}"
    else:
        refusals = "".join(f"; {name}: {why}" for name, why in refused.items())
        advice = f"nothing is left to adapt at a micro-batch of {size}{refusals}. Try {smaller}"
    message = f"out of memory in phase {phase.name} at step {training.step} ({reason}); {advice}"
    training.event("out_of_memory", message, phase=phase.name, micro_batch=size, adapted=dict(run.adapted))
    raise MemoryBudgetError(message)


def handle_non_finite(training: Training, phase: Phase, done: Update) -> bool:
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
        stop(training, phase, done, f"{SKIP_PATIENCE} steps in a row were not finite")
    if policy == "stop" or training.rollbacks >= training.train.max_rollbacks:
        after = f" after {training.rollbacks} rollbacks" if training.rollbacks else ""
        stop(training, phase, done, f"the loss of {phase.name} is not finite at step {training.step}{after}")
    return roll_back(training, f"{phase.name} was not finite at step {training.step}")


def roll_back(training: Training, why: str) -> bool:
    """Return to the newest whole checkpoint. The metrics written since then are dropped, the events stay."""
    try:
        loaded = checkpoint.load(training.directory)
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


def stop(training: Training, phase: Phase, done: Update, why: str) -> None:
    """Raise NonFiniteError naming the first bad module and operator of an update that was skipped."""
    assert done.batch is not None
    culprit = find_first_non_finite(training.run, phase, done.batch)
    training.event("stopped", f"{why}; first at {culprit}")
    remedies = ["a lower optimizer.lr", "optimizer.clip_grad_norm=1"]
    precision = training.run.precision
    if any(not scaler.dynamic for scaler in precision.scalers.values()):
        remedies.append("a lower precision.loss_scale")
    if precision.dtype != torch.float32:
        remedies.append("precision=fp32")
    tried = f"{', '.join(remedies[:-1])} or {remedies[-1]}"
    raise NonFiniteError(f"{why}. First bad value: {culprit}. Try {tried}")


def check_floor(training: Training, updates: Mapping[str, Update]) -> None:
    """Act when a scale sits at its floor and still overflows: stop, or fall back, as `precision.at_min_scale` says."""
    run = training.run
    for phase in run.phases:
        scaler = run.precision.scalers.get(phase.name)
        if scaler is None or scaler.overflows_at_floor < FLOOR_PATIENCE or phase.name not in updates:
            continue
        why = f"{phase.name}: gradients overflow at the smallest loss scale, {scaler.scale:.10g}"
        if run.config.precision.settings.at_min_scale == "fall_back" and run.precision.fall_back(run.task):
            run.scaled_phases = frozenset()
            training.event("fall_back", f"{why}; going on in bfloat16 without scaling")
            training.console.warning(f"{why}; going on in bfloat16 without scaling")
            return
        training.save()
        stop(training, phase, updates[phase.name], why)


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
