"""The types at the seams: what a task, a precision mode, a memory trick and a data set are to each other.

One function performs a training step (`mpt.engine.step`). `mpt train` runs it on real tensors, `mpt plan` runs it on
fake ones and watches the allocations. So nothing behind these seams may look at a tensor's values on the way to or
inside a step (no `.item()`, no `if tensor:`), and the device is always an argument, never a global.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.errors import DataError

Batch = dict[str, Tensor]
"""Named tensors that share dimension 0, the sample dimension.

A task sees images as float32 in [0, 1], NCHW. A data set of one image per sample calls it "image"; one of several has
a field for each, with any names, sizes and channels, and they need not be square. A data set may deliver an image as
uint8, a quarter of the bytes: the engine divides it by 255 on the device (`DataSpec.as_floats`).

What a sample has a varying number of is padded to a fixed length M, so that shapes do not depend on the data, and has a
mask that says which rows are real. Boxes of objects are, by convention, `boxes` (M, 4) float32 as x1 y1 x2 y2 in pixels
of the image, `classes` (M,) int64, and `box_mask` (M,) bool; padding rows are zero. `mpt.data.padding` makes them.
"""

FieldKind = Literal["image", "mask", "boxes", "target"]

F = TypeVar("F", bound=Callable[..., Any])


class Loss(NamedTuple):
    """One scalar to back-propagate.

    `reduction` says how the batch was reduced, so that micro-batches can be weighted exactly: a mean is weighted by its
    share of the samples, a sum by one.
    """

    name: str
    value: Tensor
    reduction: Literal["mean", "sum"] = "mean"


@dataclass(frozen=True)
class Phase:
    """One optimizer update within a step: what is trained here, everything else being frozen meanwhile.

    `name` keys the loss scaler, metrics ("disc/real") and checkpoint entries. `losses(batch)` yields losses one by
    one; each is back-propagated before the next is computed, and a yielded loss's graph is never used again. `every`
    runs the phase only on steps divisible by it (lazy regularisation, critics). `scaled=False` exempts the phase from
    loss scaling (second-order penalties diverge under it).
    """

    name: str
    module: nn.Module
    optimizer: Optimizer
    losses: Callable[[Batch], Iterator[Loss]]
    every: int = 1
    scaled: bool = True


@dataclass
class StepStats:
    """What one phase's update did. `grad_norm` stays on the device until it is logged."""

    skipped: bool = False
    scale: float | None = None
    grad_norm: Tensor | None = None


@dataclass(frozen=True)
class FieldSpec:
    """Shape (without the batch dimension), dtype and kind of one field of a batch.

    The kind says what may be done to the field on its way: an "image" in uint8 is converted on the device; an image,
    a "mask" (c, h, w) and "boxes" (M, 4) follow a geometric augmentation; a "target" is left alone.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: FieldKind = "target"


@dataclass(frozen=True)
class DataSpec:
    """What a data set delivers, known without reading it all: enough to build a model and to plan its memory."""

    fields: Mapping[str, FieldSpec]
    size: int
    classes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def require(self, name: str, reader: str) -> FieldSpec:
        """Return a field that `reader` ("model dcgan") reads. Raises DataError where the data set does not deliver it.

        Call while building: in a step a missing field would be a KeyError.
        """
        if name not in self.fields:
            raise DataError(
                f"{reader}: it needs '{name}' of each sample, but this data set delivers {', '.join(self.fields)}. "
                "Use another data set; `mpt list datasets` says what each holds"
            )
        return self.fields[name]

    def to_record(self) -> dict[str, Any]:
        """Return the layout as JSON can hold it."""
        fields = {
            name: {"shape": list(spec.shape), "dtype": str(spec.dtype).removeprefix("torch."), "kind": spec.kind}
            for name, spec in self.fields.items()
        }
        return {"fields": fields, "size": self.size, "classes": list(self.classes), "extra": dict(self.extra)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DataSpec:
        """Read what `to_record` wrote. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
        fields = {}
        for name, entry in record["fields"].items():
            dtype = getattr(torch, entry["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{entry['dtype']!r} is not a dtype")
            kind = entry.get("kind", "image" if name == "image" else "target")  # not in records of earlier versions
            if kind not in get_args(FieldKind):
                raise ValueError(f"{kind!r} is no kind of field")
            fields[str(name)] = FieldSpec(tuple(int(side) for side in entry["shape"]), dtype, kind)
        return cls(fields, int(record["size"]), tuple(map(str, record["classes"])), dict(record["extra"]))

    def zeros(self, batch_size: int, device: torch.device | str, stored: bool = False) -> Batch:
        """Return a batch of zeros as a task sees it, for dry runs; `stored`: as the data set delivers it."""
        batch = {
            name: torch.zeros((batch_size, *spec.shape), dtype=spec.dtype, device=device)
            for name, spec in self.fields.items()
        }
        return batch if stored else self.as_floats(batch)

    def as_floats(self, batch: Batch) -> Batch:
        """Return a batch with its uint8 images as float32 in [0, 1], the same numbers on every device."""
        images = [name for name, spec in self.fields.items() if spec.kind == "image" and name in batch]
        converted = {}
        for name in images:
            if batch[name].dtype == torch.uint8:
                # By a tensor: CUDA multiplies by the reciprocal of a number, which rounds differently.
                converted[name] = batch[name] / torch.full((), 255.0, device=batch[name].device)
        return {**batch, **converted} if converted else batch


class Dataset(Protocol):
    """Random access to samples. `fetch` depends on (seed, epoch, index) alone, so the number of workers changes
    nothing.
    """

    @property
    def spec(self) -> DataSpec: ...

    def __len__(self) -> int: ...

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch: ...


@dataclass
class Inference:
    """What a task's inference makes: pictures to write, rows of a table, or both."""

    tiles: Tensor | None = None
    """Images in [0, 1], NCHW."""
    columns: int | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    outputs: Tensor | None = None
    """Raw float32 outputs, by which two precisions are compared."""
    figures: dict[str, Tensor] = field(default_factory=dict)
    """Further pictures by file stem."""
    figure_columns: dict[str, int] = field(default_factory=dict)
    """Columns of their grids, as square as can be where none are named."""


class Task(Protocol):
    """A kind of training. Built on one device; knows nothing of precision, memory tricks, files or the loop."""

    modules: Mapping[str, nn.Module]
    """All saved state, EMA copies included."""
    trainable: Mapping[str, nn.Module]
    """Optimizer name -> the module it trains."""
    metric: str
    """Name of the evaluation figure that chooses the best checkpoint."""
    higher_is_better: bool
    inputs: tuple[str, ...]
    """The batch fields that `mpt infer --input` fills, one file each; () for a task that makes samples from noise."""
    optional_inputs: bool
    """Whether a task with `inputs` can also make samples without any."""

    @property
    def blocks(self) -> Sequence[nn.Module]: ...  # units that memory tricks may wrap

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]: ...

    def draw(self, batch: Batch, phase: Phase) -> Batch: ...  # add this update's random inputs, before any split

    def after_step(self, step: int, samples_seen: int) -> None: ...  # EMA and the like; no host synchronisation

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]: ...

    def preview(self, batch: Batch) -> Tensor | None: ...  # an image grid's tiles in [0, 1], NCHW, fixed over the run

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference: ...  # for inputs, or `count` samples

    def state_dict(self) -> dict[str, Any]: ...  # what is not in modules: running averages, controllers

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Precision(Protocol):
    """A precision mode: a small object of which most methods do nothing in most modes."""

    name: str
    dtype: torch.dtype
    reason: str
    """Why this mode and dtype were chosen; printed and recorded."""

    def prepare(self, task: Task) -> None: ...  # module surgery, before optimizers exist

    def parameters(self, module: nn.Module) -> list[nn.Parameter]: ...  # what the optimizer updates (masters under O2)

    def bind(self, phases: Sequence[Phase]) -> None: ...  # make a scaler per phase

    def forward(self) -> AbstractContextManager[Any]: ...

    def loss(self, function: F) -> F: ...  # run a loss function in float32, outside autocast

    def backward(self, loss: Tensor, phase: Phase) -> None: ...

    def step(self, phase: Phase, clip_norm: float | None) -> StepStats: ...  # unscale, clip, step, update

    def fall_back(self, task: Task) -> bool: ...  # go on in bfloat16 without scaling; False where the mode cannot

    def scales(self) -> dict[str, float]: ...

    def skips_overflow(self) -> frozenset[str]: ...  # phases with a dynamic scale, where overflow is no fault

    def module_state(self, module: nn.Module) -> dict[str, Tensor]: ...  # float32 state to save

    def load_module_state(self, module: nn.Module, state: Mapping[str, Tensor]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class MemoryTrick(Protocol):
    """One way to hold less. Applied to a built task before the optimizers exist; never a branch in the loop."""

    name: str
    exact: bool
    """Are gradients bit-equal to the run without it?"""

    def apply(self, task: Task, precision: Precision) -> None: ...

    def forward(self) -> AbstractContextManager[Any]: ...  # entered around every forward
