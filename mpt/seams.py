"""The types at the seams: what a task, a precision mode, a memory trick and a data set are to each other.

One function performs a training step (`mpt.engine.step`). `mpt train` runs it on real tensors, `mpt plan` runs it on
fake ones and watches the allocations. So nothing behind these seams may look at a tensor's values on the way to or
inside a step (no `.item()`, no `if tensor:`), and the device is always an argument, never a global.

The data's side is in `mpt.samples`, an update's in `mpt.phases`, a task's in `mpt.task`. All are named here too, so
that a part needs this one module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.config.schema import Config
from mpt.parallel.world import ALONE, World
from mpt.phases import NOTHING as NOTHING
from mpt.phases import Loss as Loss
from mpt.phases import Phase as Phase
from mpt.phases import StepStats as StepStats
from mpt.samples import Batch as Batch
from mpt.samples import Dataset as Dataset
from mpt.samples import DataSpec as DataSpec
from mpt.samples import FieldKind as FieldKind
from mpt.samples import FieldSpec as FieldSpec
from mpt.task import Evidence as Evidence
from mpt.task import Inference as Inference
from mpt.task import Task as Task
from mpt.task import copy_containers as copy_containers
from mpt.task import gather as gather

F = TypeVar("F", bound=Callable[..., Any])


class Scaler(Protocol):
    """The loss scale of one phase."""

    scale: float
    dynamic: bool
    """Whether a step that overflows is skipped and the scale changed."""
    overflows_at_floor: int
    """Overflows in a row at the smallest scale."""

    def unscale(self, parameters: Sequence[nn.Parameter]) -> bool: ...  # in place; whether any gradient overflowed


class Precision:
    """A precision mode: a small object of which most methods do nothing in most modes. This one is plain float32."""

    name: str
    dtype: torch.dtype
    reason: str
    """Why this mode and dtype were chosen; printed and recorded."""
    notes: Sequence[str] = ()
    """Warnings to be shown before the first step, known once the networks are prepared."""
    scalers: Mapping[str, Scaler] = MappingProxyType({})
    """Phase name -> its scaler, for the phases that are scaled."""
    masters: Mapping[Tensor, nn.Parameter] = MappingProxyType({})
    """Half weight -> the float32 parameter that the optimizer updates in its place."""
    is_sharded: bool = False
    """Set before `prepare` where networks will be sharded: what has masters else stays float32 and is gathered in half.
    """
    gathered_in_half: Collection[Tensor] = ()
    """The float32 parameters that are gathered in half, where networks are sharded."""
    steps_in_backward: bool = False
    """Set where parameters are updated, and their gradients released, before `step` is called."""
    uses_tf32: bool = False
    """Whether products of float32 are computed in TF32, on a GPU that has it."""
    product_unit: float | None = None
    """Relative distance of neighbouring numbers in which products are computed, where that is coarser than `dtype`'s.
    """
    changes_calls: bool = False
    """Whether calls are changed one by one as they are made, which a compiled graph has none of."""
    replaces_step: bool = False
    """Whether `optimize` works on the optimizer's state by itself, and so needs one that keeps it as tensors."""

    rounds_weights: bool = False
    """Whether updates are added to weights in half and rounded to the nearest, so that small ones are lost."""

    def convert(self, networks: Mapping[str, nn.Module]) -> None:
        """Change built networks on the CPU, before they are moved to the device."""

    def prepare(self, task: Task) -> None:
        """Change the task's networks, before optimizers exist."""

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Return what the optimizer updates for a module: its parameters, or their masters."""
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    def bind(self, phases: Sequence[Phase]) -> None:
        """Make a scaler for each phase that wants one."""

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of one forward."""
        return NOTHING

    def float32(self) -> AbstractContextManager[Any]:
        """Return a context that leaves the mode: inside `forward`, what is computed in it is computed in float32."""
        return nullcontext()

    def loss(self, function: F) -> F:
        """Wrap a loss function to run in float32, outside the mode."""
        return function

    def backward(self, loss: Tensor, phase: Phase) -> None:
        """Back-propagate one loss, scaled where the phase is."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, phase: Phase, clip_norm: float | None) -> StepStats:
        """Unscale and clip the gradients, and step the phase's optimizer."""
        self.optimize(phase)
        return StepStats()

    def optimize(self, phase: Phase) -> None:
        """Let the phase's optimizer update the parameters that are in its groups now."""
        phase.optimizer.step()

    def keep_more(self, module: nn.Module) -> bool:
        """Keep one more module in float32 from now on; return False where the mode cannot."""
        return False

    def keeping(self, modules: Sequence[nn.Module]) -> AbstractContextManager[int]:
        """Keep modules in float32 inside a block, as far as the mode can; yields how many were not kept before."""
        return nullcontext(0)

    def fall_back(self, task: Task) -> bool:
        """Go on in bfloat16 without scaling; return False where the mode cannot."""
        return False

    def scales(self) -> dict[str, float]:
        """Return the loss scale of each scaled phase."""
        return {name: scaler.scale for name, scaler in self.scalers.items()}

    def skips_overflow(self) -> frozenset[str]:
        """Return the phases with a dynamic scale, in which an overflow is no fault."""
        return frozenset(name for name, scaler in self.scalers.items() if scaler.dynamic)

    def module_state(self, module: nn.Module) -> dict[str, Tensor]:
        """Return a module's float32 state to save, by its own state-dict keys."""
        return module.state_dict()

    def load_module_state(self, module: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load what `module_state` returned; shapes and keys were checked by the caller."""
        module.load_state_dict(dict(state))

    def state_dict(self) -> dict[str, Any]:
        """Return what is to be saved of the mode itself."""
        return {"dtype": str(self.dtype).removeprefix("torch."), "scalers": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, of this mode or of the one that the run had before."""


class MemoryTrick:
    """One way to hold less; never a branch in the step or the loop.

    It meets the run when the networks are built (`host`), when the task is and before precision and optimizers are
    (`apply`), when everything is built (`attach`), and in every update (`forward`, `backward`, `step`: contexts around
    those moments).
    """

    name: str
    exact: bool = True
    """Are gradients bit-equal to the run without it?"""
    replaces_optimizers: bool = False
    """Such tricks are attached first: what others hang on an optimizer would be lost with it."""

    def host(self, networks: Mapping[str, nn.Module], device: torch.device) -> None:
        """Choose weights that do not go to the device: before the networks, on the CPU or `meta`, are moved there.

        A layer's attribute `travelling_names` has the names of its parameters that stay.
        """

    def apply(self, task: Task, precision: Precision) -> None:
        """Change the built task, before optimizers exist."""

    def attach(self, run: Run) -> None:
        """Change the built run, before its first step."""

    def fold(self, modules: Mapping[str, nn.Module]) -> None:
        """Take out of trained networks what was put into them, for export: adapters become part of their weights."""

    def abandon(self, phase: Phase) -> None:
        """Forget what was begun of a phase's update that failed and will be repeated."""

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of one forward."""
        return NOTHING

    def backward(self, phase: Phase) -> AbstractContextManager[Any]:
        """Return the context of one loss's backward."""
        return NOTHING

    def step(self, phase: Phase) -> AbstractContextManager[Any]:
        """Return the context of a phase's optimizer step, unscaling and clipping included."""
        return NOTHING


@dataclass
class Run:
    """A built training: everything that an update needs, and nothing of files or the loop."""

    config: Config
    device: torch.device
    data: DataSpec
    task: Task
    precision: Precision
    tricks: list[MemoryTrick]
    optimizers: dict[str, Optimizer]
    optimizer_settings: dict[str, OptimizerOptions]
    phases: list[Phase]
    frozen: dict[str, list[nn.Parameter]]
    """Phase name -> parameters of the other trained modules, frozen meanwhile."""
    clip_norms: dict[str, float | None]
    scaled_phases: frozenset[str]
    buffers: list[Tensor] = field(default_factory=list)
    """Buffers of the trained networks, which a skipped step must leave as they were."""
    shadows: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)
    """The buffers of each dtype and their copies, made at the first update."""
    stable_forms: AbstractContextManager[Any] = NOTHING
    """What computes numerically poor forms by stable ones in each forward (`precision.stable_forms`)."""
    micro_batch_size: int | None = None
    micro_batch_auto: bool = False
    adapted: dict[str, Any] = field(default_factory=dict)
    """Memory tricks that were set since the build because memory ran out, in the configuration's words."""
    trained: dict[str, list[nn.Parameter]] = field(default_factory=dict)
    """Phase name -> its weights and their masters, found at the phase's first update."""
    notes: list[str] = field(default_factory=list)
    """What a user should be warned of."""
    messages: list[str] = field(default_factory=list)
    """What was done while building that a user should know: weights that were loaded."""
    world: World = ALONE
    """The processes that train together."""
    keeps_gradients: bool = False
    """Gradients are filled with zeros when an update begins, instead of released."""
