"""torchvision's object detectors, trained by the task `detect`: one camera, torchvision's own losses.

Faster R-CNN, RetinaNet, FCOS and SSD, by torchvision's names. Nothing is downloaded: weights come from `model.weights`.
The pictures keep the data set's size (torchvision would enlarge them to 800 pixels), `ssd300_vgg16` excepted, whose
anchors are made for 300. Class 0 is the background, as in torchvision's programs, so that their weights fit.

The input is one picture tensor, (b, 3 or 1, h, w) in [0, 1]. Which boxes answer for which object depends on values:
such a network waits for the device in its forward, and is planned with bounds (`bounded_shapes`).
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpt.config.options import ModelOptions
from mpt.errors import ConfigError
from mpt.seams import DataSpec
from mpt.systems.yolofuse.nn.layers.bounded_shapes import bounded, place_anchors

TASK = "detect"
NAMES: dict[str, dict[str, object]] = {
    "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn": {},
    "torchvision:fasterrcnn_mobilenet_v3_large_fpn": {},
    "torchvision:fasterrcnn_resnet50_fpn": {},
    "torchvision:fasterrcnn_resnet50_fpn_v2": {},
    "torchvision:fcos_resnet50_fpn": {},
    "torchvision:retinanet_resnet50_fpn": {},
    "torchvision:retinanet_resnet50_fpn_v2": {},
    "torchvision:ssd300_vgg16": {},
    "torchvision:ssdlite320_mobilenet_v3_large": {},
}
ABOUT = {
    "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn": "Faster R-CNN on MobileNetV3, for 320 pixels.",
    "torchvision:fasterrcnn_mobilenet_v3_large_fpn": "Faster R-CNN on MobileNetV3 with a feature pyramid.",
    "torchvision:fasterrcnn_resnet50_fpn": "Faster R-CNN on ResNet-50 with a feature pyramid.",
    "torchvision:fasterrcnn_resnet50_fpn_v2": "Faster R-CNN on ResNet-50, recipe of 2022.",
    "torchvision:fcos_resnet50_fpn": "FCOS on ResNet-50: boxes without anchors.",
    "torchvision:retinanet_resnet50_fpn": "RetinaNet on ResNet-50: one stage, focal loss.",
    "torchvision:retinanet_resnet50_fpn_v2": "RetinaNet on ResNet-50, recipe of 2022.",
    "torchvision:ssd300_vgg16": "SSD on VGG-16 for pictures of 300 pixels.",
    "torchvision:ssdlite320_mobilenet_v3_large": "SSDlite on MobileNetV3 for pictures of 320 pixels.",
}
LEAST_SCORE = 0.001
"""Score from which the network reports a box; average precision needs the weak ones too."""
NO_SIZE = "ssd300_vgg16"


class Settings(ModelOptions):
    """The camera, the size of the pictures, and the arguments of the network's constructor."""

    camera: Literal["rgb", "ir"] = "rgb"
    """The camera whose pictures are used; a grey picture is given in three equal channels."""
    image_size: int = Field(320, ge=32)
    """Longer side of the pictures in pixels."""
    most_detections: int = Field(300, ge=1)
    """Detections per picture, after the network's own suppression."""
    options: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    """Keyword arguments of the constructor, such as `rpn_post_nms_top_n_train`."""


class TorchvisionDetector(nn.Module):
    """A torchvision detector that takes and gives the padded tensors of the task."""

    gives_losses = True

    def __init__(self, net: nn.Module, camera: str, classes: int, most: int) -> None:
        super().__init__()
        self.net = net
        self.cameras = (camera,)
        self.classes, self.most = classes, most

    def forward(
        self,
        pictures_bchw: Tensor,
        boxes_bm4: Tensor | None = None,
        classes_bm: Tensor | None = None,
        valid_bm: Tensor | None = None,
    ) -> dict[str, Tensor] | tuple[Tensor, Tensor]:
        """Return the losses by name if boxes are given (in training mode), else the detections.

        Detected are boxes (b, n, 4) in pixels and scores (b, n, classes), n being `most_detections`; a box has a score
        for the one class that it was found for, and padding has none.
        """
        pictures = list(pictures_bchw.expand(-1, 3, -1, -1))
        if boxes_bm4 is None:
            return self.padded(self.net(pictures), pictures_bchw)
        assert classes_bm is not None
        assert valid_bm is not None
        # torchvision raises on a box without area
        valid_bm = valid_bm & (boxes_bm4[..., 2:] > boxes_bm4[..., :2]).all(-1)
        with bounded(self.net) if isinstance(pictures_bchw, FakeTensor) else nullcontext():
            targets = [
                {"boxes": boxes[valid].float(), "labels": kinds[valid] + 1}
                for boxes, kinds, valid in zip(boxes_bm4, classes_bm, valid_bm, strict=True)
            ]
            losses: dict[str, Tensor] = self.net(pictures, targets)
        return losses

    def padded(self, found: list[dict[str, Tensor]], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return torchvision's lists of detections as padded float32 tensors."""
        boxes_bn4 = like.new_zeros((len(found), self.most, 4), dtype=torch.float32)
        scores_bnc = like.new_zeros((len(found), self.most, self.classes), dtype=torch.float32)
        for boxes, scores, one in zip(boxes_bn4, scores_bnc, found, strict=True):
            real = one["labels"] > 0  # RetinaNet and FCOS have an output for the background too
            kinds = one["labels"][real] - 1
            boxes[: len(kinds)] = one["boxes"][real].float()
            scores[torch.arange(len(kinds), device=like.device), kinds] = one["scores"][
                real
            ].float()
        return boxes_bn4, scores_bnc


def build(settings: Settings, data: DataSpec, name: str) -> dict[str, nn.Module]:
    """Build `net` by its full name. Raises ConfigError for refused options, DataError for no such camera."""
    if not data.classes:
        raise ConfigError(f"model {name}: the data set names no classes to detect")
    channels, height, width = data.require(
        settings.camera, f"model {name} (camera {settings.camera})"
    ).shape
    if channels not in (1, 3):
        raise ConfigError(
            f"model {name}: '{settings.camera}' has {channels} channels; 1 and 3 are understood"
        )
    net = make(name.partition(":")[2], len(data.classes) + 1, dict(settings.options))
    resize_to(net, name, height, width)
    if next(net.parameters()).is_meta:
        place_anchors(net)
    judge: Any = getattr(net, "roi_heads", net)
    judge.score_thresh, judge.detections_per_img = LEAST_SCORE, settings.most_detections
    return {
        "net": TorchvisionDetector(
            net, settings.camera, len(data.classes), settings.most_detections
        )
    }


def make(name: str, classes: int, options: dict[str, Any]) -> nn.Module:
    """Return torchvision's network without weights. Raises ConfigError for options that its constructor refuses."""
    from mpt import vision_ops

    detection = vision_ops.import_detection()
    constructor = getattr(detection, name, None)
    if constructor is None:
        raise ConfigError(f"model.name: this torchvision has no detector {name}")
    fixed = {"num_classes": classes, "weights": None, "weights_backbone": None}
    try:
        net: nn.Module = constructor(**{**options, **fixed})
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"model.options: torchvision:{name} refused {options}: {error}"
        ) from error
    # torchvision takes any further argument without a word
    known = {
        *inspect.signature(constructor).parameters,
        *inspect.signature(type(net)).parameters,
    } - fixed.keys()
    if unknown := sorted(options.keys() - known):
        raise ConfigError(f"model.options: torchvision:{name} has no {unknown[0]!r}")
    return net


def resize_to(net: nn.Module, name: str, height: int, width: int) -> None:
    """Let the network take pictures of this size as they are."""
    transform: Any = net.transform
    if transform.fixed_size is None:
        transform.min_size, transform.max_size = (min(height, width),), max(height, width)
    elif not name.endswith(NO_SIZE):
        transform.fixed_size = (width, height)
