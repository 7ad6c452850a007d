"""One step of a run without its optimizer: its losses, gradients, buffers and operators. The run stays as it was.

Gradients are taken at the largest power-of-two loss scale that leaves them finite, as a dynamic scale would end up
with.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpt.doctor.measuring.cuda_lists import CudaLists
from mpt.doctor.measuring.half_arithmetic import RoundedHalf
from mpt.doctor.measuring.instrument import Result, observed, real_values
from mpt.engine.building.build import seed_everything
from mpt.engine.step.step import back_propagate, drop_gradients
from mpt.seams import Batch, Phase, Run
from mpt.seams.phase_losses import draw_batch
from mpt.seams.undo import notes_of, take_back

HALVINGS = 40
"""Of a loss scale, at most."""


@dataclass
class Step:
    """Results of one phase's update, before the optimizer."""

    losses: dict[str, float]
    gradients: dict[str, Tensor]
    """Parameter's dotted name -> gradient without the loss scale, float32 on the CPU."""
    buffers: dict[str, Tensor]
    scale: float | None = None
    results: list[Result] = field(default_factory=list)
    drawn: Batch = field(default_factory=dict)
    """The batch with its random inputs."""
    by_cuda_lists: list[str] = field(default_factory=list)
    """Operators that a CPU computed in float32 because CUDA's autocast does."""

    @property
    def is_finite(self) -> bool:
        """Whether losses and gradients are all finite."""
        return all(math.isfinite(value) for value in self.losses.values()) and all(
            bool(torch.isfinite(value).all()) for value in self.gradients.values()
        )

    @property
    def has_overflowed(self) -> bool:
        """Whether gradients are not finite although the losses are: a smaller loss scale may help."""
        return not self.is_finite and all(math.isfinite(value) for value in self.losses.values())


def take_step(run: Run, phase: Phase, batch: Batch, *, watched: bool = False) -> Step:
    """Return one update's losses and gradients, without the optimizer; the run stays as it was.

    If gradients overflow at a dynamic loss scale, the step is repeated at half of it until they do not. What
    overflows is watched once at most: looking takes several times as long as the step.
    """
    scaler = run.precision.scalers.get(phase.name)
    before = scaler.scale if scaler is not None else None
    try:
        step = repeat_backward(run, phase, batch, watched=watched)
        if scaler is None or not scaler.dynamic or not step.has_overflowed:
            return step
        for _ in range(HALVINGS):
            scaler.scale /= 2
            step = repeat_backward(run, phase, batch)
            if not step.has_overflowed:
                break
        return repeat_backward(run, phase, batch, watched=True) if watched else step
    finally:
        if scaler is not None and before is not None:
            scaler.scale = before


def repeat_backward(
    run: Run,
    phase: Phase,
    batch: Batch,
    *,
    watched: bool = False,
    exact: bool = False,
    reseeds: bool = True,
) -> Step:
    """Take forward and backward of one update from the same random numbers, and undo their effects.

    Without `reseeds` the random numbers are those that come next. `exact` watches every bit (`observed`).
    """
    if reseeds:
        seed_everything(run.config.seed)
    notes = notes_of(run.task)
    drop_gradients(run, phase)
    run.buffers.remember()
    scaler = run.precision.scalers.get(phase.name)
    scale = scaler.scale if scaler is not None else 1.0
    try:
        drawn = draw_batch(
            run, phase, run.data.as_floats({name: t.to(run.device) for name, t in batch.items()})
        )
        with contextlib.ExitStack() as stack:
            lists = stack.enter_context(half_as_on_a_gpu(run))
            seen = stack.enter_context(observed(run.task.modules, exact=exact)) if watched else None
            losses = back_propagate(run, phase, drawn)
        own = {id(parameter) for parameter in phase.module.parameters()}
        gradients = {
            name: real_values(parameter.grad.detach().to_dense()).float().cpu() / scale
            for name, parameter in named_parameters(run)
            if parameter.grad is not None and id(parameter) in own
        }
        buffers = {
            name: value.detach().float().cpu().clone()
            for name, value in named_buffers(run)
            if value.is_floating_point()
        }
    finally:
        drop_gradients(run, phase)
        run.buffers.restore()
        take_back(run.task, notes)
    return Step(
        losses={name: float(value) for name, value in losses.items()},
        gradients=gradients,
        buffers=buffers,
        scale=None if scaler is None else scale,
        results=seen.results if seen is not None else [],
        drawn=drawn,
        by_cuda_lists=sorted(lists.used),
    )


@contextlib.contextmanager
def half_as_on_a_gpu(run: Run) -> Iterator[CudaLists]:
    """Compute on a CPU as a GPU does, in the block: float16's arithmetic, and autocast by CUDA's lists."""
    dtype, lists = run.precision.numerics.dtype, CudaLists()
    with contextlib.ExitStack() as stack:
        if run.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
            stack.enter_context(lists)
        if run.device.type == "cpu" and dtype == torch.float16:
            stack.enter_context(RoundedHalf())
        yield lists


def named_parameters(run: Run) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield every network's parameters by dotted name."""
    for name, module in run.task.modules.items():
        for key, parameter in module.named_parameters():
            yield f"{name}.{key}", parameter


def named_buffers(run: Run) -> Iterator[tuple[str, Tensor]]:
    """Yield every network's buffers by dotted name."""
    for name, module in run.task.modules.items():
        for key, value in module.named_buffers():
            yield f"{name}.{key}", value


def rounded_step(
    run: Run, phase: Phase, batch: Batch, dtype: torch.dtype, *, watched: bool = False
) -> Step:
    """Take a float32 step with weights and images moved by up to half a unit in the last place of a dtype."""
    amount = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    with moved_weights(run, amount) as move:
        return take_step(
            run, phase, {name: move(value) for name, value in batch.items()}, watched=watched
        )


@contextlib.contextmanager
def moved_weights(run: Run, amount: float) -> Iterator[Callable[[Tensor], Tensor]]:
    """Move every weight by up to a share of itself within the block; yields a function that moves other tensors so."""
    numbers = torch.Generator().manual_seed(1)
    weights = [parameter for _, parameter in named_parameters(run)]
    kept = [parameter.detach().clone() for parameter in weights]
    try:
        with torch.no_grad():
            for parameter in weights:
                parameter.copy_(moved(parameter, amount, numbers))
        yield lambda value: moved_input(value, amount, numbers)
    finally:
        with torch.no_grad():
            for parameter, value in zip(weights, kept, strict=True):
                parameter.copy_(value)


def moved(value: Tensor, amount: float, numbers: torch.Generator) -> Tensor:
    """Return a tensor whose floating values are moved by up to a share of themselves."""
    if value.is_complex():
        return torch.view_as_complex(moved(torch.view_as_real(value), amount, numbers))
    if not value.is_floating_point():
        return value
    noise = torch.rand(value.shape, generator=numbers) * 2 - 1
    return value * (1 + amount * noise.to(value.device, value.dtype))


def moved_input(value: Tensor, amount: float, numbers: torch.Generator) -> Tensor:
    """Return an input that is moved so, but for whole numbers: they may be places or labels, and half holds them."""
    if not value.is_floating_point():
        return moved(value, amount, numbers)
    return torch.where(value == value.round(), value, moved(value, amount, numbers))
