"""The types at the seams: what a task, a precision mode, a memory trick and a data set are to each other.

One function performs a training step (`mpt.engine.step`). `mpt train` runs it on real tensors, `mpt plan` runs it on
fake ones and watches the allocations. So nothing behind these seams may look at a tensor's values on the way to or
inside a step (no `.item()`, no `if tensor:`), and the device is always an argument, never a global.

The data's side is in `mpt.samples`, and is named here too, so that a part needs this one module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions
from mpt.config.schema import Collapse, Config
from mpt.errors import ConfigError
from mpt.parallel.world import ALONE, World
from mpt.samples import Batch as Batch
from mpt.samples import Dataset as Dataset
from mpt.samples import DataSpec as DataSpec
from mpt.samples import FieldKind as FieldKind
from mpt.samples import FieldSpec as FieldSpec

F = TypeVar("F", bound=Callable[..., Any])
NOTHING = nullcontext()
"""A context that does nothing, which is cheaper not to make anew."""


class Loss(NamedTuple):
    """One scalar to back-propagate.

    `reduction` says how the batch was reduced, so that micro-batches can be weighted exactly: a mean is weighted by its
    share of the samples, a sum by one. `weight` is for phases that are `normalised`, see there.
    """

    name: str
    value: Tensor
    reduction: Literal["mean", "sum"] = "mean"
    weight: Tensor | float | None = None


@dataclass(frozen=True)
class Phase:
    """One optimizer update within a step: what is trained here, everything else being frozen meanwhile.

    `name` keys the loss scaler, metrics ("disc/real") and checkpoint entries. `losses(batch)` yields losses one by
    one; each is back-propagated before the next is computed, and a yielded loss's graph is never used again. `every`
    runs the phase only on steps divisible by it (lazy regularisation, critics), `since` and `until` only from that step
    on and before that step (stages of a training). `scaled=False` exempts the phase from
    loss scaling (second-order penalties diverge under it).

    A loss that is normalised by something else than the number of samples has two ways to be exact in micro-batches:

    - `prepare(batch)` runs once per update on the whole batch, before it is split, and may add the normaliser as a
      field with a value per sample. Losses are then sums over samples of normalised terms (`reduction="sum"`).
    - Where the normaliser needs the forward (task-aligned assignment): `normalised=True`. Losses are then
      un-normalised sums, each with `weight`, the part's share of the normaliser as a tensor on the device; all losses
      of a part have the same. The gradient is that of the sums divided by the total weight of the batch, which counts
      as `least_weight` where it is less, as detectors have it (`max(sum, 1)`).
    """

    name: str
    module: nn.Module
    optimizer: Optimizer
    losses: Callable[[Batch], Iterable[Loss]]
    """Yields the losses of a batch one after the other; returns a tuple where all are computed at once."""
    every: int = 1
    scaled: bool = True
    since: int = 0
    until: int | None = None
    prepare: Callable[[Batch], Batch] | None = None
    normalised: bool = False
    least_weight: float = 1.0

    def is_due(self, step: int) -> bool:
        """Does the phase run in this step?"""
        return step % self.every == 0 and step >= self.since and (self.until is None or step < self.until)


@dataclass
class StepStats:
    """What one phase's update did. `grad_norm` stays on the device until it is logged."""

    skipped: bool = False
    scale: float | None = None
    grad_norm: Tensor | None = None


@dataclass
class Inference:
    """What a task's inference makes: pictures to write, rows of a table, or both."""

    tiles: Tensor | None = None
    """Images in [0, 1], NCHW."""
    columns: int | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    outputs: Tensor | None = None
    """Raw float32 outputs, by which two precisions are compared."""
    scores: Tensor | None = None
    """Probabilities of all classes (b, classes), in the order of `DataSpec.classes`."""
    figures: dict[str, Tensor] = field(default_factory=dict)
    """Further pictures by file stem."""
    figure_columns: dict[str, int] = field(default_factory=dict)
    """Columns of their grids, as square as can be where none are named."""


Evidence = dict[str, Tensor]
"""What an evaluation keeps of one batch: named tensors whose dimension 0 is the samples of that batch."""


def gather(evidence: Iterable[Evidence], name: str) -> Tensor:
    """Return one field of the evidence, of all batches that have it."""
    return torch.cat([one[name] for one in evidence if name in one])


class Task:
    """A kind of training. Built on one device; knows nothing of memory tricks, files or the loop.

    The engine enters the modes: `evaluate_batch`, `evaluate_samples`, `preview` and `infer` are called with all
    networks in evaluation mode, without gradients, inside the precision mode's forward context, and with random numbers
    that are seeded for the call and taken back after it. `conclude` is called so too, but in float32.
    """

    modules: Mapping[str, nn.Module]
    """All saved state, EMA copies included."""
    trainable: Mapping[str, nn.Module]
    """Optimizer name -> the module it trains."""
    metric: str
    """Name of the evaluation figure that chooses the best checkpoint."""
    higher_is_better: bool
    metric_note: str | None = None
    """One sentence on what the metric is measured in, told when a run begins."""
    preview_columns: int | None = None
    """Columns of the preview's grid, as square as can be where None."""
    inputs: tuple[str, ...] = ()
    """Batch fields that inference can be given; () for a task that makes samples from noise."""
    inputs_note: str | None = None
    """One sentence on what inputs were taken for, told by `mpt infer` when it was given some.
    "RUN" in it is the run's folder."""
    opponents: tuple[str, str] | None = None
    """The phases of a discriminator and of the generator that plays against it, which are watched for a collapse."""
    bounded_losses: bool = False
    """Whether both sides' losses can never be negative."""
    limits: Collapse = Collapse.model_validate({})
    """From when on `advise` and `collapse` speak of a collapse (`train.collapse`)."""
    optional_inputs: bool = False
    """Whether a task with `inputs` can also make samples without any."""
    differentiates_twice: bool = False
    """Whether a loss holds a gradient (a gradient penalty), so that its backward needs the weights a second time."""
    evaluation_samples: int = 0
    """Samples made from nothing, of which `evaluate_samples` is asked at each evaluation."""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Return the networks in which memory tricks look for units to wrap."""
        return list(self.trainable.values())

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        """Return the updates of one step, in order."""
        raise NotImplementedError(f"{type(self).__name__} does not train")

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        """Return the batch with this update's random inputs. Called on the whole batch, before any split."""
        return batch

    @property
    def rate_factor(self) -> float:
        """Return what learning rates are multiplied by: 1, unless the task lowers them by what it was told."""
        return 1.0

    def after_evaluation(self, figures: Mapping[str, float]) -> None:
        """Follow an evaluation on the whole test set (a rate that falls on a plateau)."""

    def after_step(self, step: int, samples_seen: int) -> None:
        """Follow a finished step (EMA and the like), without waiting for the device."""

    def evaluate_batch(self, batch: Batch) -> Evidence:
        """Return what `conclude` needs of a batch of test data. Batches may be smaller, and on several processes."""
        return {}

    def evaluate_samples(self, first: int, count: int) -> Evidence:
        """Return what `conclude` needs of samples `first` to `first + count` of the `evaluation_samples`."""
        return {}

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        """Return the figures of an evaluation, `metric` among them, from the evidence of all batches, on the CPU."""
        raise NotImplementedError(f"{type(self).__name__} does not evaluate")

    details: Mapping[str, Any] | None = None
    """What the last `conclude` found beside its figures, for the report, as plain data.

    `worst` names samples, `section` is what the run's page shows (see `mpt.report.evaluation_section`).
    """

    def preview(self, batch: Batch) -> Tensor | None:
        """Return an image grid's tiles in [0, 1], NCHW, which show the same samples over the whole run."""
        return None

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference:
        """Return what is made of inputs, or without them `count` samples."""
        raise NotImplementedError(f"{type(self).__name__} does not infer")

    def tiles_of(self, height: int, width: int) -> Iterator[tuple[int, int]]:
        """Yield the heights and widths of the tiles that a frame can be cut into for inference, largest first."""
        raise ConfigError("this task does not infer in tiles: leave out --frame")

    def samples(self, total: int, first: int, count: int, seed: int, truncation: float = 1.0) -> Tensor:
        """Return samples `first` to `first + count` of the `total` that a seed gives, in [0, 1], NCHW."""
        raise ConfigError("this task makes no samples from noise: leave out --count, --single and --walk")

    def walk(self, seeds: Sequence[int], frames: int) -> Tensor:
        """Return images in [0, 1] on the way from each seed's sample to the next's, `frames` for each two."""
        raise ConfigError("this task makes no samples from noise: leave out --count, --single and --walk")

    def export_terms(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what the tensors into and out of an exported network are called."""
        return ("images",) if self.inputs else ("latents",), ("outputs",) if self.inputs else ("images",)

    def export_texts(self) -> dict[str, str]:
        """Return what an exported file says of this task's networks, beside what every file says."""
        return {}

    def whole(self, network: nn.Module) -> nn.Module | None:
        """Return an exported network with what goes around it inside: images in [0, 1] in, probabilities out.

        None where the task has nothing to put around it.
        """
        return None

    def from_whole(self, inputs: tuple[Any, ...], network: Callable[..., Any]) -> Any:
        """Return what the network alone would, called with its inputs, from a network that `whole` returned."""
        raise NotImplementedError(f"{type(self).__name__} has no whole network")

    def advise(self, figures: Mapping[str, float]) -> Iterable[str]:
        """Return warnings about logged losses or figures of an evaluation."""
        return ()

    def collapse(self, figures: Mapping[str, float]) -> str | None:
        """Return how the training has collapsed by logged losses or figures of an evaluation; None where it has not."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what is to be saved and is not in modules: running averages, controllers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def snapshot(self) -> dict[str, Any]:
        """Return what the task has noted on itself, for undoing an update that fails. No tensor is copied.

        Notes are attributes: numbers, tensors (replaced, not changed in place) and containers of them. A task that
        changes tensors in place during an update returns copies of those.
        """
        return {name: copy_containers(value) for name, value in vars(self).items()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Forget what was noted since `snapshot`, which may be restored once."""
        for name in vars(self).keys() - snapshot.keys():
            delattr(self, name)
        for name, value in snapshot.items():
            setattr(self, name, value)


def copy_containers(value: Any) -> Any:
    """Copy dicts, lists and sets all the way down, and nothing else: tensors and modules stay themselves."""
    if type(value) is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) in (list, set):
        return type(value)(copy_containers(item) for item in value)
    return value


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
    replaces_step: bool = False
    """Whether `optimize` works on the optimizer's state by itself, and so needs one that keeps it as tensors."""

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
        return nullcontext()

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
