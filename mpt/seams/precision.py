"""A precision mode as the engine sees it: it decides arithmetic, weights and loss scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from mpt.seams.phases import NOTHING, Phase, StepStats
from mpt.seams.task import Task

F = TypeVar("F", bound=Callable[..., Any])


class Scaler(Protocol):
    """The loss scale of one phase."""

    scale: float
    dynamic: bool
    """Whether a step that overflows is skipped and the scale changed."""
    overflows_at_floor: int
    """Overflows in a row at the smallest scale."""
    has_overflowed: bool
    """Whether any gradient was not finite in this process, at a scale that skips no step too."""

    # in place; whether any gradient overflowed
    def unscale(self, parameters: Sequence[nn.Parameter]) -> bool: ...
    def update(self, overflowed: bool) -> None: ...  # after each step, or skipped one
    # read the scale from memory of the device from now on
    def keep_on(self, device: torch.device) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Numerics:
    """The arithmetic of a mode, as the planner, the doctor and the memory tricks ask for it."""

    dtype: torch.dtype
    """The arithmetic of products, as far as the mode decides it."""
    reason: str
    """Why this mode and dtype were chosen; printed and recorded."""
    notes: tuple[str, ...] = ()
    """Warnings to be shown before the first step, known once the networks are prepared."""
    product_unit: float | None = None
    """Relative distance of neighbouring numbers in which products are computed, if coarser than `dtype`'s."""
    uses_tf32: bool = False
    """Whether products of float32 are computed in TF32, on a GPU that has it."""
    rounds_weights: bool = False
    """Whether updates are added to weights in half and rounded to the nearest, so that small ones are lost."""
    casts_calls: bool = False
    """Whether calls are cast one by one as they are made, which a compiled graph has none of."""
    lifts_state: bool = False
    """Whether `optimize` works on the optimizer's state alone, and so needs one that keeps it as tensors."""


class Precision:
    """A precision mode: a small object of which most methods do nothing in most modes. This one is plain float32."""

    name: str
    numerics: Numerics
    scalers: Mapping[str, Scaler] = MappingProxyType({})
    """Phase name -> its scaler, for the phases that are scaled."""
    masters: Mapping[Tensor, nn.Parameter] = MappingProxyType({})
    """Half weight -> the float32 parameter that the optimizer updates in its place.

    Before networks are sharded, a float32 parameter that is to be gathered in half is its own master.
    """

    def convert(self, networks: Mapping[str, nn.Module]) -> None:
        """Change built networks on the CPU, before they are moved to the device."""

    def prepare(self, task: Task, *, is_sharded: bool = False) -> None:
        """Change the task's networks, before optimizers exist.

        `is_sharded` is asked of modes with `SHARDED` alone: the networks will be sharded, so that a part with masters
        otherwise stays float32 and is gathered in half.
        """

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Return a module's tensors for the optimizer: its parameters, or their masters."""
        return [self.masters.get(one, one) for one in module.parameters() if one.requires_grad]

    def bind(self, phases: Sequence[Phase]) -> None:
        """Make a scaler for each phase that wants one."""

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of one forward."""
        return NOTHING

    def float32(self) -> AbstractContextManager[Any]:
        """Return a context that leaves the mode: inside `forward`, its block computes in float32."""
        return nullcontext()

    def loss(self, function: F) -> F:
        """Wrap a loss function to run in float32, outside the mode."""
        return function

    def backward(self, loss: Tensor, phase: Phase) -> None:
        """Back-propagate one loss, scaled if the phase is."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, phase: Phase, clip_norm: float | None) -> StepStats:
        """Unscale and clip the gradients, and step the phase's optimizer.

        An infinite `clip_norm` asks for the gradients' norm alone.
        """
        self.optimize(phase)
        return StepStats()

    def optimize(self, phase: Phase) -> None:
        """Let the phase's optimizer update the parameters that are in its groups now."""
        phase.optimizer.step()

    def keep_float32(self, module: nn.Module) -> bool:
        """Keep one more module in float32 from now on; return False if the mode cannot or it is kept already."""
        return False

    def fall_back(self, task: Task) -> bool:
        """Continue in bfloat16 without scaling; return False if the mode cannot."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the mode's own state for a checkpoint."""
        return {"dtype": str(self.numerics.dtype).removeprefix("torch."), "scalers": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, of this mode or of the one that the run had before."""


def loss_scales(precision: Precision) -> dict[str, float]:
    """Return the loss scale of each scaled phase."""
    return {name: scaler.scale for name, scaler in precision.scalers.items()}


def has_dynamic_scale(precision: Precision, phase: Phase) -> bool:
    """Return whether a phase has a dynamic scale, so that an overflow is no fault."""
    scaler = precision.scalers.get(phase.name)
    return scaler is not None and scaler.dynamic
