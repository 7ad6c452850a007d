"""A kind of training as the engine sees it: what a task trains, evaluates, shows, infers and saves.

Named in `mpt.seams` too, which is the module for a part to import from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.config.schema import Collapse
from mpt.errors import ConfigError
from mpt.phases import Phase
from mpt.samples import Batch


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
    def draws_by_shape(self) -> bool:
        """Return whether `draw` looks at the shapes, dtypes and device of the batch's fields alone, never into them.

        It then adds fields, or leaves some out, and passes on the others as they are. Several processes each have their
        own samples only where that is so; else each gathers the whole batch. For a class with a `draw` of its own it is
        taken to be False unless that class says otherwise. The answer is the same for the whole training.
        """
        return True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "draw" in vars(cls) and "draws_by_shape" not in vars(cls):
            cls.draws_by_shape = False  # type: ignore[assignment,method-assign]

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
