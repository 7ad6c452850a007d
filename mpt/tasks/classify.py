"""Image classification: one network, one phase, cross-entropy or another loss, accuracy.

Images are standardised on the device with `task.mean` and `task.std` (by default 0.5 and 0.5, that is to [-1, 1];
ImageNet's own figures are given in `configs/resnet50_imagefolder.yaml`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from mpt.config.options import CROSS_ENTROPY, Options
from mpt.config.part_names import LossName, MetricName
from mpt.errors import ConfigError, DataError
from mpt.losses.shared.choice import find_loss
from mpt.metrics.shared.classification import describe
from mpt.nn.shared.devices import compute_device
from mpt.seams import (
    IGNORED,
    Batch,
    DataSpec,
    Evidence,
    Exports,
    Inference,
    Loss,
    Phase,
    Precision,
    gather,
)
from mpt.tasks.shared.advice import Advice
from mpt.tasks.shared.mixing import OTHER, SHARE, mix

MOVED = {"ema": "train.ema.decay"}


class Settings(Options):
    """Loss and input scaling of a classifier."""

    loss: LossName = "cross_entropy"
    """The loss: cross_entropy, or the name of a file in `losses/` with `loss(logits, labels)`, as focal."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """How much of the cross-entropy's target is spread over all classes."""
    class_weights: Literal["balanced"] | dict[str, Annotated[float, Field(ge=0)]] | None = None
    """The weight of a class in the cross-entropy, as torch's `weight`: balanced is the inverse of its share of the
    training set; or by name, `{rust: 4}`, the others 1."""
    mixup: float | None = Field(None, gt=0)
    """MixUp's alpha: batches are blended with themselves, labels too. 0.2 to 0.8 is usual."""
    cutmix: float | None = Field(None, gt=0)
    """CutMix's alpha, usually 1: boxes of other images are pasted in. With `mixup` too, each batch has one of them."""
    mean: tuple[float, ...] = (0.5,)
    """Subtracted from the image, one number or one per channel."""
    std: tuple[float, ...] = (0.5,)
    """The divisor of the image after that."""
    metrics: tuple[MetricName, ...] = ()
    """Further figures at every evaluation, by their file's name in `metrics/`: `[top_five]`."""


class Classify(Exports):
    """Train `net` to name images."""

    metric, higher_is_better = "accuracy", True
    inputs = ("image",)

    def __init__(
        self, settings: Settings, net: nn.Module, data: DataSpec, precision: Precision
    ) -> None:
        self.settings, self.net, self.classes, self.precision = (
            settings,
            net,
            data.classes,
            precision,
        )
        self.modules: dict[str, nn.Module] = {"net": net}
        self.advice = Advice()
        self.trainable = {"net": net}
        # Made once: from a list, each would be a blocking copy to the GPU in every step.
        device = compute_device(net)
        weights = class_weights(settings, data)
        self.class_weights = None if weights is None else torch.tensor(weights, device=device)
        self.is_normalised = weights is not None or may_lack_labels(data)
        self.loss = precision.loss(
            find_loss(settings.loss, settings.label_smoothing, self.class_weights)
        )
        self.mean = torch.tensor(settings.mean, device=device).view(1, -1, 1, 1)
        self.std = torch.tensor(settings.std, device=device).view(1, -1, 1, 1)

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        """Return the one phase."""
        return [
            Phase(
                "net",
                self.net,
                optimizers["net"],
                self.losses,
                normalised=self.is_normalised,
                least_weight=1e-12,
            )
        ]

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        """Return the batch with its samples mixed, if the settings want it."""
        settings = self.settings
        if settings.mixup is None and settings.cutmix is None:
            return batch
        return mix(batch, settings.mixup, settings.cutmix)

    @property
    def draws_by_shape(self) -> bool:
        """Samples that are mixed need each other."""
        return self.settings.mixup is None and self.settings.cutmix is None

    def losses(self, batch: Batch) -> tuple[Loss, ...]:
        """Return the loss, cross-entropy by default: a mean, or a sum and its weight if samples weigh differently."""
        logits = self.checked(self.net(self.standardize(batch["image"])))
        if not self.is_normalised:
            return (Loss("loss", of_mixture(batch, partial(self.loss, logits))),)
        return (
            Loss(
                "loss",
                of_mixture(batch, lambda label: self.total(logits, label)),
                "sum",
                of_mixture(batch, lambda label: total_weight(self.class_weights, label)),
            ),
        )

    def total(self, logits: Tensor, label: Tensor) -> Tensor:
        """Return the sum of the loss over the samples that have a label."""
        if self.class_weights is not None:
            return self.loss(logits, label)
        count = total_weight(None, label)
        # The mean over no sample is NaN: if all are left out they take the class 0, and their sum counts nothing.
        return self.loss(logits, torch.where(count > 0, label, label.clamp_min(0))) * count

    def standardize(self, image_bchw: Tensor) -> Tensor:
        """Subtract the mean and divide by the standard deviation, per channel."""
        return (image_bchw - self.mean) / self.std

    def logits(self, image_bchw: Tensor) -> Tensor:
        """Return float32 logits of the network that is evaluated."""
        return self.checked(self.net(self.standardize(image_bchw))).float()

    def checked(self, output: Any) -> Tensor:
        """Return a network's output if it is logits. Raises ConfigError with the expected output of a model."""
        if (
            isinstance(output, Tensor)
            and output.dim() == 2
            and output.shape[1] >= len(self.classes)
        ):
            return output
        found = f"a {type(output).__name__}"
        if isinstance(output, Tensor):
            found = f"a tensor of shape ({', '.join(map(str, output.shape))})"
        raise ConfigError(
            f"model {type(self.net).__name__}: its forward returned {found}; task classify expects a tensor of logits "
            f"of shape (batch, {len(self.classes)}), one number per class"
        )

    def evaluate_batch(self, batch: Batch) -> Evidence:
        """Return the logits (b, classes) and the labels (b,)."""
        return {"logits": self.logits(batch["image"]), "labels": batch["label"]}

    def advise(self, figures: Mapping[str, float]) -> list[str]:
        """Return a warning, once, if there is nothing to tell apart."""
        message = (
            f"the data have one class, {self.classes[0]}, and nothing to tell apart: give each class a folder of its "
            "own in the folder of the data set"
        )
        return self.advice.say_once("one", message if len(self.classes) == 1 else None)

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        """Return accuracy and mean cross-entropy over all batches."""
        logits, labels = gather(evidence, "logits"), gather(evidence, "labels")
        is_known = labels != IGNORED
        if not bool(is_known.any()):
            raise DataError(
                f"none of the {len(labels)} test samples has a label: all are {IGNORED}, which leaves them out"
            )
        logits, labels = logits[is_known], labels[is_known]
        # In a proxy, which a snapshot of the task does not copy.
        self.details = MappingProxyType(
            describe(logits, labels, self.classes, is_known.nonzero().flatten().tolist())
        )
        return {
            "accuracy": float((logits.argmax(1) == labels).sum()) / len(labels),
            "cross_entropy": float(functional.cross_entropy(logits, labels)),
        }

    def export_terms(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of images and logits."""
        return ("images",), ("logits",)

    def whole(self, network: nn.Module) -> nn.Module:
        """Return a network from images in [0, 1] to probabilities."""
        return Whole(network, self.mean, self.std)

    def from_whole(self, inputs: tuple[Any, ...], network: Callable[..., Any]) -> Tensor:
        """Return logits, up to a constant per image, for standardised images."""
        probabilities: Tensor = network(inputs[0] * self.std + self.mean)
        return probabilities.clamp_min(1e-30).log()

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference:
        """Return the label and its probability for each image of the batch, alongside its true label if it is
        known."""
        if batch is None:
            raise DataError("infer: a classifier needs images; give --input FILE or FOLDER")
        logits = self.logits(batch["image"])
        scores = logits.softmax(1)[:, : len(self.classes)]
        best = scores.max(1)
        rows: list[dict[str, Any]] = [
            {"label": self.classes[index], "probability": round(probability, 4)}
            for index, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        if "label" in batch:
            for row, label in zip(rows, batch["label"].tolist(), strict=True):
                if label != IGNORED:
                    row["truth"] = self.classes[label]
        return Inference(rows=rows, outputs=logits, scores=scores)


def of_mixture(batch: Batch, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `measure` of a batch's labels; of mixed samples, of both labels by their shares."""
    own = measure(batch["label"])
    if SHARE not in batch:
        return own
    share = batch[SHARE][0]  # one for the whole batch
    return share * own + (1 - share) * measure(batch[OTHER])


def total_weight(weights: Tensor | None, label: Tensor) -> Tensor:
    """Return the total weight of a batch's samples, their number without weights; those left out weigh nothing."""
    is_known = label != IGNORED
    return is_known.sum() if weights is None else (weights[label.clamp_min(0)] * is_known).sum()


def may_lack_labels(data: DataSpec) -> bool:
    """Return whether samples may be labelled -100: all sets but those that have counted as many labels as samples."""
    return sum(data.extra.get("class_counts") or ()) != data.size


def class_weights(settings: Settings, data: DataSpec) -> list[float] | None:
    """Return the weight of each class, or None if all are alike. Raises ConfigError for anything that cannot be
    weighted."""
    wanted = settings.class_weights
    if wanted is None:
        return None
    if settings.loss != CROSS_ENTROPY:
        raise ConfigError(
            f"task.class_weights: they belong to the loss {CROSS_ENTROPY}, and task.loss is {settings.loss}"
        )
    if wanted != "balanced":
        for name in wanted:
            if name not in data.classes:
                some = ", ".join(data.classes[:12]) + (", ..." if len(data.classes) > 12 else "")
                raise ConfigError(
                    f"task.class_weights: there is no class {name!r}; the data set has {some}"
                )
        return [float(wanted.get(name, 1.0)) for name in data.classes]
    counts = data.extra.get("class_counts")
    if not counts:
        raise ConfigError(
            "task.class_weights: this data set does not say how many samples its classes have; give the weights by name"
        )
    present = sum(count > 0 for count in counts)
    return [sum(counts) / (present * count) if count else 1.0 for count in counts]


class Whole(nn.Module):
    """A classifier with standardisation before it and softmax after it."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean.clone())
        self.register_buffer("std", std.clone())

    def forward(self, images: Tensor) -> Tensor:
        """Return probabilities (b, classes) of images (b, c, h, w) in [0, 1]."""
        probabilities: Tensor = self.network((images - self.mean) / self.std).softmax(1)
        return probabilities


def build(
    settings: Settings,
    model_settings: Options,
    modules: Mapping[str, nn.Module],
    data: DataSpec,
    precision: Precision,
) -> Classify:
    """Build the task around `net`."""
    if "label" not in data.fields:
        raise DataError(
            "task classify: the data set has no labels; use one that has, or class folders"
        )
    if not data.classes:
        raise DataError("task classify: the data set names no classes; give its spec their names")
    channels = data.fields["image"].shape[0]
    for name in ("mean", "std"):
        if len(getattr(settings, name)) not in (1, channels):
            raise DataError(f"task.{name}: give 1 or {channels} numbers, one per channel")
    return Classify(settings, modules["net"], data, precision)
