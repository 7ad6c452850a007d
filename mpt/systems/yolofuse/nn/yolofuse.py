"""YOLOFuse: a YOLO detector for one camera, or for a visible and an infrared one in seven ways of fusion.

`fusion` chooses the place at which the cameras meet: `data` before the network, as channels of one picture, `early`
after each stage, `mid` at P3 to P5, `decision` in the head; `easy`, `deyolo` and `defa` are further published designs;
`rgb` and `ir` are one camera. `family` is the network of `rgb`, `ir` and `data`: YOLOv8, YOLO11 or YOLO26. Every tensor
has the published name and shape (tests/systems/yolofuse compares names, counts and outputs), so published state dicts
load by name.

The input is one picture tensor per camera, (b, 3 or 1, h, w) in [0, 1], sides divisible by 32. The output is the
head's raw maps: see `yolo_head`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from mpt.config.options import ModelOptions
from mpt.errors import ConfigError
from mpt.nn.shared.hidden_channels import Hidden, narrow
from mpt.seams import DataSpec
from mpt.systems.yolofuse.nn.layers.yolo_blocks import Camera, Conv, Stack
from mpt.systems.yolofuse.nn.layers.yolo_head import Detect
from mpt.systems.yolofuse.nn.layers.yolo_variants import make_plan
from mpt.systems.yolofuse.nn.weights.pruning import hidden_of_detector
from mpt.systems.yolofuse.nn.weights.yolo_weights import translate, widened

TASK = "detect"

Fusion = Literal["rgb", "ir", "data", "early", "mid", "decision", "easy", "deyolo", "defa"]
BOX_BIAS = {"yolov8": 1.0, "yolo11": 1.0, "yolo26": 2.0}


class Settings(ModelOptions):
    """The network, its size, and the weights to start from."""

    fusion: Fusion = "mid"
    """The place at which the two cameras are joined; `rgb` and `ir` are one camera, `data` stacks both as channels of
    one picture."""
    family: Literal["yolov8", "yolo11", "yolo26"] = "yolov8"
    """The network of `fusion` rgb, ir and data; the other fusions have networks of their own."""
    scale: Literal["n", "s", "m", "l", "x"] = "n"
    """The size: depth and width of all layers."""
    image_size: int = Field(640, ge=32, multiple_of=32)
    """Longer side of the pictures in pixels."""
    box_bias: float | None = None
    """Bias of the distances at the start: 1 in Ultralytics 8.3 (and YOLOFuse), 2 in 8.4; null is 2 for yolo26, else
    1."""
    hidden_share: float = Field(1.0, gt=0, le=1)
    """Share of the hidden channels that a pruned network has kept (in runs of an earlier
    version; `memory.prune` is its place now)."""

    @model_validator(mode="after")
    def _keep_the_family_to_one_picture(self) -> Settings:
        if self.family != "yolov8" and self.fusion not in ("rgb", "ir", "data"):
            raise ValueError(
                f"model.family={self.family} is for fusion rgb, ir and data; {self.fusion} has a network of its own: "
                "leave one of the two out"
            )
        return self


class YoloFuse(nn.Module):
    """The layers by number. `cameras` are the fields that it reads, in this order.

    `channels` are those of all cameras' pictures together; only `fusion: data` depends on them.
    """

    def __init__(self, settings: Settings, classes: int, channels: int = 4) -> None:
        super().__init__()
        is_stacked = settings.fusion == "data"
        plan = make_plan(
            settings.fusion, settings.scale, classes, settings.family, channels if is_stacked else 3
        )
        self.reads_layers = plan.layers[0].module is None
        self.cameras = ("rgb", "ir") if is_stacked or self.reads_layers else (settings.fusion,)
        self.branches = plan.branches
        self.sources = [layer.sources for layer in plan.layers]
        self.select = Stack() if is_stacked else Camera(0)
        self.model = nn.ModuleList(
            nn.Identity() if layer.module is None else layer.module for layer in plan.layers
        )
        head = self.model[-1]
        assert isinstance(head, Detect)
        self.strides, self.bins, self.one_to_one = head.strides, head.bins, head.one_to_one
        head.start(
            settings.image_size,
            BOX_BIAS[settings.family] if settings.box_bias is None else settings.box_bias,
        )
        self.needed = {source for sources in self.sources for source in sources}

    @property
    def head(self) -> Detect:
        """The detection head."""
        head = self.model[-1]
        assert isinstance(head, Detect)
        return head

    def hidden_channels(self) -> Iterator[Hidden]:
        """Yield the groups of channels that pruning may remove."""
        return hidden_of_detector(self)

    def forward(self, *pictures_bchw: Tensor) -> list[Tensor]:
        """Return the head's raw maps for one picture tensor per camera."""
        outputs: dict[int, Tensor] = {}
        result: list[Tensor] = []
        for number, (layer, sources) in enumerate(zip(self.model, self.sources, strict=True)):
            if isinstance(layer, Camera):
                outputs[number] = layer(pictures_bchw)
            elif number == 0 and not self.reads_layers:
                outputs[number] = layer(self.select(pictures_bchw))
            elif isinstance(layer, Detect):
                result = layer(*(outputs[n] for n in sources))
            elif sources:
                outputs[number] = layer(*(outputs[n] for n in sources))
        return result

    def check(self, height: int, width: int) -> None:
        """Raise ConfigError for pictures that this network cannot take."""
        if height % 32 or width % 32:
            raise ConfigError(
                f"model yolofuse: pictures of {height}x{width}; both sides must be divisible by 32: choose another "
                "dataset.image_size"
            )


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Build `net` for the data's classes. Raises ConfigError for pictures it cannot take, DataError for no camera."""
    if not data.classes:
        raise ConfigError("model yolofuse: the data set names no classes to detect")
    channels = sum(
        data.fields[camera].shape[0] for camera in ("rgb", "ir") if camera in data.fields
    )
    net = YoloFuse(settings, len(data.classes), channels)
    for camera in net.cameras:
        channels, height, width = data.require(
            camera, f"model yolofuse (fusion {settings.fusion})"
        ).shape
        if channels not in (1, 3):
            raise ConfigError(
                f"model yolofuse: '{camera}' has {channels} channels; 1 and 3 are understood"
            )
        net.check(height, width)
    if settings.hidden_share < 1:
        narrow(net, settings.hidden_share)
    return {"net": net}


def translate_weights(
    networks: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """Return a one-camera YOLO's tensors for both branches of a fusion, or for a picture of more channels; None for a
    file that needs no such."""
    net = networks["net"]
    assert isinstance(net, YoloFuse)
    return (
        widened(net, tensors)
        if isinstance(net.select, Stack)
        else translate(net, net.branches, tensors)
    )


def fuse(network: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode whose BatchNorms are merged into the convolutions before them.

    Outputs change by rounding only: at most 2e-3 in the raw maps in float32.
    """
    fused = copy.deepcopy(network).eval()
    for module in fused.modules():
        if isinstance(module, Conv) and isinstance(module.bn, nn.BatchNorm2d):
            module.conv = fuse_conv_bn_eval(module.conv, module.bn)
            module.bn = nn.Identity()
    return fused
