"""Object detection, from one camera or two: one network, one phase, judged by average precision.

The loss is YOLOv8's (`losses/detection.py`), in float32, normalised by the sum of the target scores of the whole batch
and multiplied by the batch size, as published; micro-batches add up to the same. Average precision is COCO's; alongside
it is computed as in the article's software, which reads higher and is for comparing with its table only.

A network with a one-to-one head (YOLO26) learns by both heads: the share of one-to-many falls from epoch to epoch. Its
detections are the best places, without suppression. A teacher's answers may be learnt in addition (`losses/shared/
distillation.py`).

A network that computes losses alone (torchvision's detectors) is trained by the mean of those, without gains.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.optim import Optimizer

from mpt.config.options import Options
from mpt.data.pictures.seeds import mix
from mpt.errors import ConfigError, DataError
from mpt.seams import Batch, DataSpec, Evidence, Exports, Inference, Legend, Loss, Phase, Precision
from mpt.systems.yolofuse.data.shared.given_files import OWN_SIZE, in_own_pixels
from mpt.systems.yolofuse.data.shared.scene_dataset import SHOWN
from mpt.systems.yolofuse.losses.shared.detection import (
    ONE_TO_MANY,
    ONE_TO_ONE,
    DetectionSums,
    detection_sums,
)
from mpt.systems.yolofuse.losses.shared.distillation import teacher_sums
from mpt.systems.yolofuse.metrics.shared.average_precision import gather_pictures, measure
from mpt.systems.yolofuse.metrics.shared.detection_details import describe as describe_evaluation
from mpt.systems.yolofuse.metrics.shared.suppression import Suppression, best_batch, suppress_batch
from mpt.systems.yolofuse.nn.layers.yolo_head import BINS, decode
from mpt.systems.yolofuse.optim.sgd_warmup import accumulates, share_of_batch
from mpt.systems.yolofuse.tasks.shared.decoded import Decoded, decoded_outputs
from mpt.systems.yolofuse.tasks.shared.drawing import draw_pair, in_words
from mpt.systems.yolofuse.tasks.shared.teacher import Teacher, open_teacher
from mpt.systems.yolofuse.tasks.shared.tiles import Look, look_in_tiles

TEST_SAMPLES = 1
EMA = {"decay": 0.9999, "ramp_steps": 2000.0, "buffers": "average"}
"""Ultralytics' own."""
PATHS = ("teacher",)
MOVED = {"ema": "train.ema.decay", "ema_ramp": "train.ema.ramp_steps"}
MOST_CLASS_FIGURES = 20
FIRST_SHARE, LAST_SHARE = 0.8, 0.1
"""Share of the one-to-many losses in the first and from the last epoch on, as in Ultralytics 8.4."""
STRIDE = 32
LETTERBOX = (
    "letterbox: all of the picture in the middle of the input, resized by min(width / own width, height / own height) "
    "(bilinear, antialiased), its left top corner at round((side - resized side) / 2), around it grey 114"
)


class Settings(Options):
    """Gains of the loss, and thresholds of detection."""

    box_gain: float = Field(7.5, ge=0)
    """Gain of the box regression loss (CIoU)."""
    class_gain: float = Field(0.5, ge=0)
    """Gain of the classification loss."""
    distance_gain: float = Field(1.5, ge=0)
    """Gain of the loss of the distances' distributions."""
    small_boxes: bool | None = None
    """Enlarge sides under 16 pixels to 16 if places are chosen, as Ultralytics 8.4 does; 8.3 and YOLOFuse do not. null
    does it for networks with a one-to-one head (yolo26)."""
    one_to_one: bool = True
    """Whether a network with a one-to-one head (yolo26) answers by it, without suppression (Ultralytics: `nms=False`);
    false answers by its one-to-many head."""
    one_to_many_epochs: int = Field(100, ge=1)
    """Of a network with a one-to-one head: epochs in which the share of the one-to-many losses falls from 0.8 to 0.1
    (Ultralytics: the length of the training)."""
    teacher: str | None = None
    """Run or checkpoint of a trained detector (model yolofuse, the same classes) whose answers are learnt too: of a
    larger one, one of another fusion, or one of a single camera."""
    teacher_gain: float = Field(1.0, ge=0)
    """Gain of the losses against the teacher, in addition to those of their kind."""
    multi_scale: float = Field(0.0, ge=0, lt=1)
    """Train on pictures up to this much smaller and larger, another size at each step."""
    best_by: Literal["map50", "map50_95"] = "map50"
    """The figure that chooses the best checkpoint, and that early stopping watches (Ultralytics: map50_95)."""
    confidence: float = Field(0.25, gt=0, lt=1)
    """Least score of shown and inferred boxes."""
    iou: float = Field(0.45, gt=0, lt=1)
    """IoU from which the worse of two boxes is dropped in shown and inferred boxes."""
    agnostic: bool = False
    """Drop overlapping boxes across classes too."""
    most_detections: int = Field(300, ge=1)
    """Detections per picture."""
    tile_overlap: float = Field(0.25, ge=0, lt=0.9)
    """Share of a tile that overlaps the next one, if a picture is larger than the network's input
    (`dataset.canvas`); objects up to this size are found whole."""


class Detect(Legend, Exports):
    """Train `net` to find objects."""

    metric, higher_is_better = "map50", True
    metric_note = (
        "mAP at IoU 0.5 is COCO's (101 recalls); the article's software reads up to 0.056 higher"
    )
    preview_columns = 4
    inputs_note = "boxes are in pixels of the pictures that were given, turned upright"

    def __init__(
        self, settings: Settings, net: nn.Module, data: DataSpec, precision: Precision
    ) -> None:
        self.settings, self.net, self.classes = settings, net, data.classes
        self.metric = settings.best_by
        self.cameras: tuple[str, ...] = net.cameras  # type: ignore[assignment]
        self.inputs = self.cameras
        self.modules: dict[str, nn.Module] = {"net": net}
        self.trainable = {"net": net}
        self.sums = precision.loss(self.detection_sums)
        self.teacher_sums = precision.loss(self.distance_from_teacher)
        self.updates = self.samples_seen = 0
        self.bins: int = getattr(net, "bins", BINS)
        self.one_to_one: bool = getattr(net, "one_to_one", False)
        """Has the network a one-to-one head?"""
        self.answers_once = self.one_to_one and settings.one_to_one
        if self.one_to_one:
            net.head.answers_once = settings.one_to_one  # type: ignore[union-attr]
        self.teacher: Teacher | None = None
        self.data_size = data.size
        height, width = data.fields[self.cameras[0]].shape[1:]
        self.size = (height, width)
        """Height and width of the network's input; larger pictures are looked at in tiles."""
        self.fields = tuple(name for name, one in data.fields.items() if one.kind == "image")
        self.accumulates = False
        self.gives_losses = bool(getattr(net, "gives_losses", False))
        """Does the network compute its losses, and decode its boxes, alone (torchvision's)?"""

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        """Return the one phase."""
        self.accumulates = accumulates(optimizers["net"])
        if self.gives_losses:
            return [Phase("net", self.net, optimizers["net"], self.own_losses)]
        if self.settings.teacher is not None:
            self.teacher = open_teacher(self.settings.teacher, self.net, self.fields, self.classes)
        return [Phase("net", self.net, optimizers["net"], self.losses, normalised=True)]

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        """Take the samples that the optimizer's warm-up asks for, note their number, resize them if sizes change."""
        first = next(iter(batch.values()))
        share = share_of_batch(phase.optimizer)
        if share < 1 and not isinstance(first, FakeTensor):  # planned is the whole
            size = math.ceil(share * len(first))
            batch = {name: value[:size] for name, value in batch.items()}
            first = first[:size]
        batch = {
            **batch,
            "samples": torch.full((len(first),), float(len(first)), device=first.device),
        }
        return self.resize(batch) if self.settings.multi_scale else batch

    @property
    def draws_by_shape(self) -> bool:
        """Pictures are resampled if their size changes, and fewer are taken if an optimizer accumulates."""
        return not self.settings.multi_scale and not self.accumulates

    def resize(self, batch: Batch) -> Batch:
        """Return the batch in this step's size. Planned is the largest."""
        height, width = batch[self.cameras[0]].shape[2:]
        spread = self.settings.multi_scale
        is_fake = isinstance(batch[self.cameras[0]], FakeTensor)
        factor = (
            1 + spread
            if is_fake
            else random.Random(mix(self.updates)).uniform(1 - spread, 1 + spread)
        )
        size = tuple(
            max(STRIDE, math.ceil(side * factor / STRIDE) * STRIDE) for side in (height, width)
        )
        pictures = {
            name: functional.interpolate(
                batch[name], size=size, mode="bilinear", align_corners=False
            )
            for name in self.fields
            if name in batch
        }
        across, down = size[1] / width, size[0] / height
        boxes = torch.stack(
            [batch["boxes"][..., n] * (across if n % 2 == 0 else down) for n in range(4)], -1
        )
        return {**batch, **pictures, "boxes": boxes}

    def losses(self, batch: Batch) -> tuple[Loss, ...]:
        """Return the three losses with their gains, and their normaliser."""
        raw = self.net(*self.pictures(batch))
        truth = batch["boxes"], batch["classes"], batch["box_mask"]
        levels = len(raw) // 2 if self.one_to_one else len(raw)
        sums = self.sums(raw[:levels], *truth)
        weight = sums.normaliser
        parts = self.gained(sums)
        if self.one_to_one:
            once = self.sums(raw[levels:], *truth, once=True)
            # All losses of a part have one normaliser; losses divided by another one are multiplied by it here.
            share, factor = self.share_of_many, weight.clamp(min=1) / once.normaliser.clamp(min=1)
            parts = {f"many_{name}": share * value for name, value in parts.items()}
            parts |= {
                name: (1 - share) * factor * value for name, value in self.gained(once).items()
            }
        if self.teacher is not None:
            parts["teacher"] = self.settings.teacher_gain * self.teacher_sums(
                raw[:levels], self.teacher(batch)
            )
        samples = batch["samples"][0]
        return tuple(Loss(name, value * samples, "sum", weight) for name, value in parts.items())

    def gained(self, sums: DetectionSums) -> dict[str, Tensor]:
        """Return the three losses with their gains."""
        settings = self.settings
        return {
            "box": settings.box_gain * sums.box,
            "class": settings.class_gain * sums.kind,
            "distribution" if self.bins > 1 else "distance": settings.distance_gain * sums.distance,
        }

    @property
    def share_of_many(self) -> float:
        """Return the share of the one-to-many losses in this epoch."""
        epoch = self.samples_seen // max(1, self.data_size)
        left = max(0.0, 1 - epoch / max(1, self.settings.one_to_many_epochs - 1))
        return left * (FIRST_SHARE - LAST_SHARE) + LAST_SHARE

    def own_losses(self, batch: Batch) -> tuple[Loss, ...]:
        """Return the network's own losses, normalised as that network does it: a mean over the part."""
        losses = self.net(
            *self.pictures(batch), batch["boxes"], batch["classes"], batch["box_mask"]
        )
        return tuple(
            Loss(name.removeprefix("loss_"), value.float()) for name, value in losses.items()
        )

    def detection_sums(
        self,
        raw: Sequence[Tensor],
        boxes: Tensor,
        classes: Tensor,
        mask: Tensor,
        once: bool = False,
    ) -> DetectionSums:
        """Return the losses before gains, of the one-to-one head with `once`."""
        raw = [level.float() for level in raw]
        enlarges = (
            self.one_to_one if self.settings.small_boxes is None else self.settings.small_boxes
        )
        choice = (ONE_TO_ONE if once else ONE_TO_MANY)._replace(
            least_side=16.0 if enlarges else 0.0
        )
        strides: Any = self.net.strides
        return detection_sums(raw, strides, boxes, classes, mask, choice, self.bins)

    def distance_from_teacher(self, raw: Sequence[Tensor], taught: Sequence[Tensor]) -> Tensor:
        """Return the loss against the teacher's maps, with the gains of its kinds."""
        assert self.teacher is not None
        strides: Any = self.net.strides
        ours, theirs = ([level.float() for level in maps] for maps in (raw, taught))
        sums = teacher_sums(ours, theirs, strides, self.bins, self.teacher.bins)
        settings = self.settings
        gain = settings.distance_gain if self.bins == self.teacher.bins > 1 else settings.box_gain
        return settings.class_gain * sums.kind + gain * sums.box

    def pictures(self, batch: Batch) -> list[Tensor]:
        """Return the cameras' pictures in the network's order."""
        return [batch[name] for name in self.cameras]

    def after_step(self, step: int, samples_seen: int) -> None:
        """Count the updates and the samples."""
        self.updates, self.samples_seen = step + 1, samples_seen

    def predict(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return boxes (b, p, 4) in pixels and scores (b, p, classes), before suppression."""
        return self.answer(self.look, batch)

    def answer(self, look: Look, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return boxes and scores as `look` finds them in the pictures, or in tiles of larger ones."""
        pictures = self.pictures(batch)
        if self.is_tiled(batch):
            return look_in_tiles(look, pictures, self.size, self.settings.tile_overlap)
        return look(pictures)

    def is_tiled(self, batch: Batch) -> bool:
        """Return whether the pictures are larger than the network's input."""
        height, width = batch[self.cameras[0]].shape[2:]
        return height > self.size[0] or width > self.size[1]

    def look(self, pictures: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return boxes (b, p, 4) in pixels and scores (b, p, classes) of pictures as large as the network's input."""
        found: Any = self.net(*pictures)
        if self.gives_losses or isinstance(found, Decoded):
            boxes, scores = found
            return boxes, scores
        return decode(found, self.net.strides, self.bins)  # type: ignore[arg-type]

    def detections(self, batch: Batch) -> Tensor:
        """Return (b, n, 6): corners in pixels, score, class, of shown and inferred boxes; score 0 is padding."""
        return self.shown(*self.predict(batch), self.is_tiled(batch))

    def shown(self, boxes: Tensor, scores: Tensor, is_tiled: bool) -> Tensor:
        """Return the detections among boxes and scores that reach `task.confidence`."""
        settings = self.settings
        how = Suppression(
            settings.confidence, settings.iou, settings.agnostic, False, settings.most_detections
        )
        return self.chosen(boxes, scores, how, is_tiled)

    def chosen(
        self, boxes: Tensor, scores: Tensor, how: Suppression, is_tiled: bool = False
    ) -> Tensor:
        """Return (b, n, 6): the boxes that suppression keeps, or the best places of a one-to-one head, which needs
        none.

        Tiles show the same object more than once, to any head.
        """
        needs_none = self.answers_once and not is_tiled
        return best_batch(boxes, scores, how) if needs_none else suppress_batch(boxes, scores, how)

    def evaluate_batch(self, batch: Batch) -> Evidence:
        """Return the detections down to a score of 0.001, and the truth."""
        how = Suppression(0.001, 0.7, self.settings.agnostic, True, self.settings.most_detections)
        found = self.chosen(*self.predict(batch), how, self.is_tiled(batch))
        return self.evidence(batch, found)

    def evidence(self, batch: Batch, found: Tensor) -> Evidence:
        """Return detections, cut at the edges of the picture on its canvas as those that are given out, and truth."""
        if SHOWN in batch:
            low, high = (
                side.repeat(1, 1, 2) for side in batch[SHOWN].to(found)[:, None].chunk(2, -1)
            )
            corners = found[..., :4].maximum(low).minimum(high)
            found = torch.cat((corners, found[..., 4:]), -1)
        return {"found": found, **{name: batch[name] for name in ("boxes", "classes", "box_mask")}}

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        """Return mAP, and precision and recall at the best F1."""
        pictures = gather_pictures(evidence)
        limit = self.settings.most_detections
        coco = measure(pictures, len(self.classes), "coco", limit)
        article = measure(pictures, len(self.classes), "ultralytics-8.3", limit)
        confidence, iou = self.settings.confidence, self.settings.iou
        self.details = MappingProxyType(
            describe_evaluation(pictures, self.classes, coco, article, confidence, iou)
        )
        figures = {
            "map50": coco.map50,
            "map50_95": coco.map50_95,
            "precision": float(coco.precision.mean()) if len(coco.classes) else 0.0,
            "recall": float(coco.recall.mean()) if len(coco.classes) else 0.0,
            "map50_article": article.map50,
            "map50_95_article": article.map50_95,
        }
        if 1 < len(self.classes) <= MOST_CLASS_FIGURES:
            figures |= {
                f"ap50/{self.classes[kind]}": float(coco.ap[kind, 0])
                for kind in coco.classes.tolist()
            }
        return figures

    def preview(self, batch: Batch) -> Tensor | None:
        """Return the cameras side by side with the detections in each pair."""
        drawn = torch.stack(list(self.drawn(batch, self.detections(batch))))
        if not self.is_tiled(batch):
            return drawn
        # a canvas is too large for a grid of several
        size = (self.size[0], self.size[1] * len(self.cameras))
        return functional.interpolate(drawn, size=size, mode="bilinear", antialias=True).clamp(0, 1)

    def drawn(self, batch: Batch, detections: Tensor) -> Iterator[Tensor]:
        """Yield each pair with its boxes, classes and scores, (3, h, w of all cameras) in [0, 1]."""
        for index, own in enumerate(detections.cpu().numpy()):
            pair = [batch[name][index].cpu() for name in self.cameras]
            yield draw_pair(pair, own[own[:, 4] > 0], self.classes)

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference:
        """Return the detections of each pair: drawn as the network sees it, and as rows.

        Boxes of given files are in the pixels of the files' pictures, those of test samples in the sample's.
        """
        if batch is None:
            raise DataError(
                f"infer: a detector needs pictures; give --input for {' and '.join(self.cameras)}"
            )
        boxes, scores = self.predict(batch)
        found = self.shown(boxes, scores, self.is_tiled(batch))
        rows = []
        height, width = batch[self.cameras[0]].shape[2:]
        sizes = batch[OWN_SIZE].tolist() if OWN_SIZE in batch else [(width, height)] * len(found)
        most = 1.0 if self.is_tiled(batch) else math.inf
        for padded, size in zip(found.cpu().numpy(), sizes, strict=True):
            own = in_own_pixels(padded, tuple(size), (width, height), most)
            rows.append({"count": len(own), "boxes": in_words(own, self.classes)})
        pictures = {
            f"detected-{n:04d}": picture[None] for n, picture in enumerate(self.drawn(batch, found))
        }
        return Inference(rows=rows, figures=pictures, outputs=torch.cat((boxes, scores), 2))

    def export_texts(self) -> dict[str, str]:
        """Return the resizing of a picture to the input's size."""
        return {"mpt_fit": LETTERBOX}

    def from_whole(self, inputs: tuple[Any, ...], network: Callable[..., Any]) -> Decoded:
        """Return boxes and scores of an exported file (`mpt yolofuse export`), which decodes inside."""
        made = network(*inputs)
        outputs = [made] if isinstance(made, Tensor) else list(made)
        return decoded_outputs(outputs, len(inputs[0]), len(self.classes))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, on which multi-scale's sizes depend, and of samples, for the heads' shares."""
        counts = {"updates": self.updates, "samples_seen": self.samples_seen}
        return {**counts, "best_by": self.metric}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the numbers of updates and samples. Raises ConfigError if another figure was the deciding one."""
        if (before := state.get("best_by", "map50")) != self.metric:
            raise ConfigError(
                f"task.best_by: this run's best is by {before}, not {self.metric}; set it back"
            )
        self.updates = int(state.get("updates", 0))
        self.samples_seen = int(state.get("samples_seen", 0))


def build(
    settings: Settings,
    model_settings: Options,
    modules: Mapping[str, nn.Module],
    data: DataSpec,
    precision: Precision,
) -> Detect:
    """Build the task around `net`. Raises ConfigError for a network that is no detector, DataError for no boxes."""
    for name in ("boxes", "classes", "box_mask"):
        data.require(name, "task detect")
    net = modules["net"]
    if not hasattr(net, "strides"):
        check_own_losses(net, settings)
    return Detect(settings, net, data, precision)


def check_own_losses(net: nn.Module, settings: Settings) -> None:
    """Raise ConfigError for a network without detection maps that has no losses of its own, or cannot be used so."""
    if not hasattr(net, "gives_losses"):
        raise ConfigError("task detect: this model gives no detection maps; use model yolofuse")
    if settings.multi_scale:
        raise ConfigError(
            "task.multi_scale: torchvision's detectors bring all pictures back to one size; leave it out"
        )
