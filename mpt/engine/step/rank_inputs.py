"""A rank's part of a batch: the whole one, gathered, or its own samples alone.

Random inputs, and the order in which a phase takes samples, are those of the whole batch, so that any number of ranks
trains what one process trains. A task that draws by the shapes alone (`Task.draws_by_shape`) needs nobody else's
samples for that: it draws on stand-ins in the whole batch's shape, of one number each in memory, and a rank keeps its
part of the numbers. For other tasks every rank gathers the whole batch first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mpt.engine.step.micro_batches import size_of
from mpt.seams import Batch, Phase, Run
from mpt.seams.phase_losses import draw_batch


def gathers_inputs(run: Run) -> bool:
    """Return whether there are ranks that each need the samples of all: the task looks at them before they are shared
    out.
    """
    if run.world.size == 1:
        return False
    return not run.task.draws_by_shape or any(phase.prepare is not None for phase in run.phases)


def inputs_of(run: Run, part: Batch, count: int) -> Batch:
    """Return a rank's share of the next batch of `count` samples, as a task sees it. `part` is as it is stored."""
    if gathers_inputs(run):
        # ranks may have padded to different lengths
        part = run.world.whole(run.data.filled(part), count)
    return run.data.as_floats(part)


def draw_own(run: Run, phase: Phase, own: Batch) -> tuple[Batch, int]:
    """Return a rank's part of a drawn batch, and how many samples all parts together have.

    `own` are the rank's samples, if it does not gather those of all.
    """
    count = run.config.train.batch_size
    shapes = {name: stand_in(value, count) for name, value in own.items()}
    drawn = draw_batch(run, phase, dict(shapes))
    drawn_count = size_of(drawn)
    start, stop = run.world.place(drawn_count)
    part = {}
    for name, value in drawn.items():
        if value is shapes.get(name):
            assert drawn_count == count, (
                f"{phase.name}: {name} has {count} samples, and what was drawn {drawn_count}"
            )
            part[name] = own[name]
        else:
            assert not any(shares_memory(value, shape) for shape in shapes.values()), (
                f"{phase.name}: {type(run.task).__name__}.draws_by_shape, but its draw looks into a field for {name!r}"
            )
            part[name] = value[start:stop]
    return part, drawn_count


def stand_in(value: Tensor, count: int) -> Tensor:
    """Return `count` samples shaped as those of `value`: one number in memory, not finite if it can be."""
    one = torch.full(
        (1,), math.nan if value.is_floating_point() else 0, dtype=value.dtype, device=value.device
    )
    return one.expand(count, *value.shape[1:])


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are views of one storage; true for fake ones as well."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
