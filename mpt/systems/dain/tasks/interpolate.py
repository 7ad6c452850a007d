"""Video frame interpolation: from two frames to the one between, at any time.

Phase `flow`, for the first `flow_steps` steps, trains the flow alone, on the true flow where the data have it and else
on how well it warps one frame onto the other: without that the joint training does not find motion. Phase `net`,
afterwards, trains everything by the Charbonnier distance of the frame before and after rectification (`alpha`).
`loss: laplacian` is RIFE's distance in its place; networks with a teacher (`model.version` ifnet, ifnet_m) then learn
from it too, as published. Rates of single parts are the optimizer's (`optimizer.parts`); `plateau_patience` lowers them
all when the evaluation stops improving.

Frames are padded to the network's multiple by repeating their edge, and results are cut back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.config.options import Options
from mpt.errors import ConfigError, DataError
from mpt.seams import (
    Batch,
    DataSpec,
    Evidence,
    Inference,
    Legend,
    Loss,
    Phase,
    Plateau,
    Precision,
    Tiles,
    gather,
)
from mpt.systems.dain.inference.tiles import tiles_of
from mpt.systems.dain.losses.shared.charbonnier import charbonnier, end_point_error, photometric
from mpt.systems.dain.losses.shared.laplacian import SMALLEST_SIDE, laplacian_distance
from mpt.systems.dain.metrics.shared.image_quality import (
    interpolation_error,
    peak_signal_to_noise,
    rounded,
    size_mask,
    structural_similarity,
)
from mpt.systems.dain.metrics.shared.sequence_table import describe
from mpt.systems.dain.nn.operators.interpolation import Interpolator
from mpt.systems.dain.nn.rife_published.eccv import EccvRife

TEST_SAMPLES = 1
ERROR_GAIN = 4.0
"""By which the preview multiplies errors, to be seen."""
DATASET = "procedural_triplets"
MOVED = {"ema": "train.ema.decay"}
PLATEAU_THRESHOLD = 1e-4
"""Relative improvement that counts as one."""
HIGHEST_PSNR = 100.0
"""What equal pictures count as, so that means stay finite."""


class Settings(Options):
    """What the losses look at and how the training proceeds."""

    loss: Literal["charbonnier", "laplacian"] = "charbonnier"
    """The distance of a frame from the true one. laplacian is that of Laplacian pyramids, as in RIFE's training; a
    network with a teacher then learns from it too, and `alpha` is not used."""
    distillation: float = Field(0.01, ge=0)
    """With `loss: laplacian`, the weight of the distance to the teacher's flow."""
    alpha: list[float] = Field([0.0, 1.0])
    """Weights of the loss of the blended frame and of the rectified one."""
    flow_steps: int = Field(0, ge=0)
    """Steps at the start that train the flow alone."""
    plateau_patience: int | None = Field(None, ge=0)
    """Evaluations without improvement after which learning rates are multiplied by `plateau_factor`; null: never."""
    plateau_factor: float = Field(0.2, gt=0, lt=1)
    """Factor of the learning rates after `plateau` evaluations without improvement."""
    preview_count: int = Field(6, ge=1)

    @field_validator("alpha")
    @classmethod
    def check_alpha(cls, weights: list[float]) -> list[float]:
        if len(weights) != 2 or min(weights) < 0 or sum(weights) == 0:
            raise ValueError(
                "two weights of at least 0, not both 0: of the blended frame and of the rectified one"
            )
        return weights


class Interpolate(Tiles, Plateau, Legend):
    """Train a network to make the frame between two others."""

    metric, higher_is_better = "psnr", True
    metric_note = (
        "PSNR in dB of frames rounded to 8 bits; average_psnr is that of the mean of both frames. A row of samples: "
        f"frame 0, ours, the truth, the error times {ERROR_GAIN:g}, frame 1."
    )
    preview_columns = 5
    inputs = ("first", "last")

    def __init__(
        self, settings: Settings, net: Interpolator, data: DataSpec, precision: Precision
    ) -> None:
        self.settings, self.net, self.data = settings, net, data
        self.modules: dict[str, nn.Module] = {"net": net}
        self.trainable: dict[str, nn.Module] = {"net": net}
        self.charbonnier = precision.loss(charbonnier)
        self.laplacian = precision.loss(laplacian_distance)
        self.flow_error = precision.loss(end_point_error)
        self.photometric = precision.loss(photometric)
        self.knows_flow = "flow" in data.fields
        self.test_names: list[str] = list(data.extra.get("test_names", ()))
        self.factor, self.best, self.bad_evaluations = 1.0, -math.inf, 0

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The network's parts; memory tricks find the repeated units inside."""
        return [
            child for child in self.net.children() if next(child.parameters(), None) is not None
        ] or [self.net]

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        """Return the flow's phase, if there is one, and that of the whole network."""
        steps = self.settings.flow_steps
        joint = Phase("net", self.net, optimizers["net"], self.losses, since=steps)
        if not steps:
            return [joint]
        return [Phase("flow", self.net, optimizers["net"], self.flow_losses, until=steps), joint]

    def flow_losses(self, batch: Batch) -> Iterator[Loss]:
        """Yield the distance to the true flow in pixels, or the photometric one."""
        flow, _ = self.call(self.net, batch, flow_only=True)
        if self.knows_flow:
            yield Loss("end_point_error", self.flow_error(flow, batch["flow"]))
        else:
            yield Loss("photometric", self.photometric(flow, batch["first"], batch["last"]))

    def losses(self, batch: Batch) -> Iterator[Loss | tuple[Loss, ...]]:
        """Yield the loss of the whole network, in parts that share a graph if it has a teacher."""
        if self.settings.loss == "charbonnier":
            yield self.charbonnier_loss(batch)
        elif isinstance(self.net, EccvRife):
            yield self.taught_losses(batch)
        else:
            image, _ = self.call(self.net, batch)
            yield Loss("laplacian", self.laplacian(image - batch["middle"]))

    def taught_losses(self, batch: Batch) -> tuple[Loss, ...]:
        """Return the distances of our frame and of the teacher's, and the weighted one to the teacher's flow."""
        truth = batch["middle"]
        height, width = truth.shape[-2:]
        first, last, middle = (self.net.padded(batch[name]) for name in ("first", "last", "middle"))
        image, teacher_image, distance = self.net(first, last, self.times(batch), taught_by=middle)
        return (
            Loss("laplacian", self.laplacian(image[..., :height, :width] - truth)),
            Loss("teacher", self.laplacian(teacher_image[..., :height, :width] - truth)),
            Loss("distillation", self.settings.distillation * distance),
        )

    def charbonnier_loss(self, batch: Batch) -> Loss:
        """Return the weighted distances of the frame before and after rectification as one loss: they share a graph."""
        image, blended = self.call(self.net, batch)
        on_blend, on_image = self.settings.alpha
        if blended is None:
            on_blend, on_image = 0.0, 1.0
        value = on_image * self.charbonnier(image - batch["middle"]) if on_image else 0.0
        if on_blend and blended is not None:
            value = value + on_blend * self.charbonnier(blended - batch["middle"])
        return Loss("charbonnier", cast(Tensor, value))

    def call(
        self, net: nn.Module, batch: Batch, flow_only: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the network's outputs of padded frames, cropped to their size."""
        first, last = batch["first"], batch["last"]
        height, width = first.shape[-2:]
        padded = [self.net.padded(image) for image in (first, last)]
        image, blended = net(*padded, self.times(batch), flow_only)
        return image[..., :height, :width], None if blended is None else blended[
            ..., :height, :width
        ]

    def times(self, batch: Batch) -> Tensor:
        """Return where the samples' middle frames are between the others (b,)."""
        first = batch["first"]
        return batch["time"] if "time" in batch else first.new_full((len(first),), 0.5)

    @property
    def rate_factor(self) -> float:
        """What the plateau rule has made of the learning rates."""
        return self.factor

    def after_evaluation(self, figures: Mapping[str, float]) -> None:
        """Lower the rates once more than `plateau_patience` evaluations in a row brought no improvement."""
        patience, figure = self.settings.plateau_patience, figures[self.metric]
        if patience is None:
            return
        least = abs(self.best) * PLATEAU_THRESHOLD if math.isfinite(self.best) else 0.0
        if figure > self.best + least:
            self.best, self.bad_evaluations = figure, 0
            return
        self.bad_evaluations += 1
        if self.bad_evaluations > patience:
            self.factor, self.bad_evaluations = self.factor * self.settings.plateau_factor, 0

    def between(self, batch: Batch) -> Tensor:
        """Return the frames between as float32, by the network that is evaluated."""
        image, _ = self.call(self.net, batch)
        return image.float()

    def evaluate_batch(self, batch: Batch) -> Evidence:
        """Return each sample's figures: ours and those of the mean of both frames."""
        ours, truth = rounded(self.between(batch)), rounded(batch["middle"])
        mean = rounded((batch["first"] + batch["last"]).float() / 2)
        mask = size_mask(batch["size"], *truth.shape[-2:]) if "size" in batch else None
        return {
            "psnr": peak_signal_to_noise(ours, truth, mask).clamp(max=HIGHEST_PSNR),
            "ssim": structural_similarity(ours, truth, mask),
            "ie": interpolation_error(ours, truth, mask),
            "average_psnr": peak_signal_to_noise(mean, truth, mask).clamp(max=HIGHEST_PSNR),
        }

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        """Return the means over the test set and, where its samples have names, PSNR and IE of each; also a table."""
        values = {name: gather(evidence, name) for name in ("psnr", "ssim", "ie", "average_psnr")}
        figures = {name: float(value.mean()) for name, value in values.items()}
        if len(self.test_names) == len(values["psnr"]):
            for name in ("psnr", "ie"):
                figures |= {
                    f"{name}/{which}": float(one)
                    for which, one in zip(self.test_names, values[name])
                }
            self.details = MappingProxyType(describe(self.test_names, values))
        return figures

    def preview(self, batch: Batch) -> Tensor | None:
        """Return rows of frame 0, ours, the truth, the error (times 4) and frame 1."""
        few = {name: value[: self.settings.preview_count] for name, value in batch.items()}
        return self.tiles(few, self.between(few))

    def tiles(self, batch: Batch, ours: Tensor) -> Tensor:
        """Return the rows of a preview; without a true frame between, of frame 0, ours and frame 1."""
        columns = [batch["first"], ours, batch["last"]]
        if "middle" in batch:
            error = (ours - batch["middle"]).abs() * ERROR_GAIN
            columns[2:2] = [batch["middle"], error]
        return torch.stack([column.float() for column in columns], dim=1).flatten(0, 1).clamp(0, 1)

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference:
        """Return the frame halfway between `first` and `last`, or at the batch's times."""
        if batch is None:
            raise DataError(
                "infer: frames are made between two others; give --input first=A --input last=B"
            )
        ours = self.between(batch)
        pictures = {
            f"between-{index:04d}": ours[index : index + 1].clamp(0, 1)
            for index in range(len(ours))
        }
        tiles = self.tiles(batch, ours)
        return Inference(
            tiles=tiles, columns=len(tiles) // len(ours), outputs=ours, figures=pictures
        )

    def tiles_of(self, height: int, width: int) -> Iterator[tuple[int, int]]:
        """Yield the tiles that `mpt dain interpolate` may cut a frame into."""
        return tiles_of(height, width, 2 * self.net.margin, self.net.multiple)

    def state_dict(self) -> dict[str, Any]:
        """Return where the plateau rule stands."""
        best = self.best if math.isfinite(self.best) else None
        return {"factor": self.factor, "best": best, "bad_evaluations": self.bad_evaluations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self.factor, self.bad_evaluations = float(state["factor"]), int(state["bad_evaluations"])
        self.best = -math.inf if state["best"] is None else float(state["best"])


def build(
    settings: Settings,
    model_settings: Options,
    modules: Mapping[str, nn.Module],
    data: DataSpec,
    precision: Precision,
) -> Interpolate:
    """Build the task around `net`."""
    for name in ("first", "middle", "last", "time"):
        data.require(name, "task interpolate")
    net = modules["net"]
    if not isinstance(net, Interpolator):
        raise ConfigError(
            "task interpolate: this model does not interpolate frames; `mpt list models` says which do"
        )
    if settings.flow_steps and not net.has_flow:
        raise ConfigError("task.flow_steps: this model has no flow to pretrain; set it to 0")
    side = min(data.fields["first"].shape[-2:])
    if settings.loss == "laplacian" and side < SMALLEST_SIDE:
        raise ConfigError(
            f"task.loss: laplacian needs frames of {SMALLEST_SIDE} pixels or more; found {side}"
        )
    return Interpolate(settings, net, data, precision)
