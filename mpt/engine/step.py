"""The one training step. `mpt train` runs it on real tensors, `mpt plan` on fake ones.

A step is one `update` per phase. An update draws the random inputs for the whole batch, splits it into micro-batches,
and back-propagates each loss before the next is computed. Nothing here looks at a tensor's values but the finite
check, which fake tensors skip.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpt.memory.set_to_none import KeepsModuleGradients
from mpt.seams import Batch, MemoryTrick, Phase, StepStats

if TYPE_CHECKING:
    from mpt.engine.build import Run


NOTHING = nullcontext()


@dataclass
class Update:
    """What one phase's update did: `stats` of the optimizer step, `losses` by name, still on the device."""

    stats: StepStats
    losses: dict[str, Tensor] = field(default_factory=dict)
    finite: bool = True
    """False when a loss was NaN or infinite and no scaler stood by: the optimizer did not step."""


def update(run: Run, phase: Phase, batch: Batch) -> Update:
    """Perform one phase's update on a whole batch."""
    drop_gradients(run, phase)
    remember_buffers(run)  # first: an update that fails may be repeated, see mpt.engine.recovery
    batch = run.task.draw(batch, phase)
    losses: dict[str, Tensor] = {}
    others = run.frozen[phase.name]
    with only(others) if others else NOTHING:
        for part, share in split(batch, run.micro_batch_size):
            pending = phase.losses(part)
            while True:
                with run.precision.forward(), memory_forward(run.tricks):
                    loss = next(pending, None)
                if loss is None:
                    break
                weight = share if loss.reduction == "mean" else 1.0
                value = loss.value if weight == 1.0 else loss.value * weight
                run.precision.backward(value, phase)
                detached = value.detach()
                losses[loss.name] = losses[loss.name] + detached if loss.name in losses else detached
                del loss, value
    if phase.name not in run.scaled_phases and not all_finite(losses):
        drop_gradients(run, phase)
        restore_buffers(run)
        return Update(StepStats(skipped=True), losses, finite=False)
    stats = run.precision.step(phase, run.clip_norms[phase.name])
    if stats.skipped:
        restore_buffers(run)
    return Update(stats, losses)


def drop_gradients(run: Run, phase: Phase) -> None:
    """Let go of the gradients of a phase's weights and of their masters.

    `zero_grad` does the same but walks the module tree each time, which a small network's step feels. It is called
    where `memory.set_to_none: false` has changed what it does.
    """
    if isinstance(phase.module, KeepsModuleGradients):
        phase.optimizer.zero_grad()
        phase.module.zero_grad()
        return
    if phase.name not in run.trained:
        groups = phase.optimizer.param_groups
        own = {id(p): p for p in (*phase.module.parameters(), *(p for group in groups for p in group["params"]))}
        run.trained[phase.name] = list(own.values())
    for parameter in run.trained[phase.name]:
        parameter.grad = None


def remember_buffers(run: Run) -> None:
    """Copy the buffers that a forward changes (BatchNorm's statistics), so that a step that is skipped leaves no
    trace.

    A forward that overflows would otherwise leave NaN in the running statistics for good, with every weight still
    finite.
    """
    if run.buffers and not run.shadows:
        # By dtype: where they are mixed, CUDA launches a kernel for each buffer.
        for dtype in dict.fromkeys(buffer.dtype for buffer in run.buffers):
            buffers = [buffer for buffer in run.buffers if buffer.dtype == dtype]
            run.shadows.append((buffers, [torch.empty_like(buffer) for buffer in buffers]))
    for buffers, copies in run.shadows:
        torch._foreach_copy_(copies, buffers)


@torch.no_grad()
def restore_buffers(run: Run) -> None:
    """Put the buffers back as they were before this update."""
    for buffers, copies in run.shadows:
        torch._foreach_copy_(buffers, copies)


@contextlib.contextmanager
def only(frozen: list[nn.Parameter]) -> Iterator[None]:
    """Freeze these parameters inside the block and thaw them after it, whatever happens."""
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def split(batch: Batch, micro_batch_size: int | None) -> Iterator[tuple[Batch, float]]:
    """Yield micro-batches, the last one possibly smaller, each with its share of the samples."""
    count = len(next(iter(batch.values())))
    if micro_batch_size is None or micro_batch_size >= count:
        yield batch, 1.0
        return
    for start in range(0, count, micro_batch_size):
        part = {name: value[start : start + micro_batch_size] for name, value in batch.items()}
        yield part, min(micro_batch_size, count - start) / count


def memory_forward(tricks: list[MemoryTrick]) -> AbstractContextManager[Any]:
    """Enter every trick's forward context."""
    if not tricks:
        return NOTHING
    stack = ExitStack()
    for trick in tricks:
        stack.enter_context(trick.forward())
    return stack


def all_finite(losses: dict[str, Tensor]) -> bool:
    """Return whether every loss is finite. One host synchronisation; fake losses count as finite."""
    values = list(losses.values())
    if not values or isinstance(values[0], FakeTensor):
        return True
    total = values[0] if len(values) == 1 else torch.stack([v.float() for v in values]).sum()
    return math.isfinite(float(total))
