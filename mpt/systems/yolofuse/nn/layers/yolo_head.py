"""The anchor-free detection head, and the meaning of its maps in pixels.

Per level the head gives 4 x 16 logits of the distances from a place to the left, top, right and bottom sides of its
box, in strides, as a distribution over 0 to 15, and one logit per class. Source: Li et al., "Generalized focal loss",
2020, for the distribution; Feng et al., "TOOD", 2021, for the places.

YOLO26's head has one bin: the four numbers are the distances themselves. It has a second pair of branches, one-to-one,
which learns to mark each object once, so that its detections need no suppression (Wang et al., "YOLOv10", 2024); it
reads the maps without a gradient to them.

`decode` runs in float32 (or float64): half precision has steps of a quarter of a pixel at 512.
Shape suffixes: b batch, c channels, h height, w width, p places (all levels one after the other, row by row).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from mpt.systems.yolofuse.nn.layers.yolo_blocks import Conv

BINS = 16


class Distribution(nn.Module):
    """The fixed kernel 0..15 that turns a distribution into its mean. A frozen parameter, as published."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(BINS, 1, 1, bias=False)
        self.conv.weight = nn.Parameter(
            torch.arange(float(BINS)).view(1, BINS, 1, 1), requires_grad=False
        )


class Detect(nn.Module):
    """Box and class branches for each level. `light` uses depthwise convolutions in the class branch (YOLO11).

    With `one_to_one` there is a second pair of branches: in training the maps of both are returned, first all levels of
    one-to-many, then those of one-to-one; in evaluation those of one pair alone.
    """

    answers_once: bool = True
    """Whether a head with both answers by one-to-one in evaluation."""

    def __init__(
        self,
        channels: Sequence[int],
        classes: int,
        strides: Sequence[int],
        light: bool,
        bins: int = BINS,
        one_to_one: bool = False,
    ) -> None:
        super().__init__()
        self.classes, self.strides, self.bins, self.one_to_one = (
            classes,
            tuple(strides),
            bins,
            one_to_one,
        )
        box = max(16, channels[0] // 4, 4 * bins)
        kind = max(channels[0], min(classes, 100))
        self.cv2 = nn.ModuleList(
            nn.Sequential(Conv(c, box, 3), Conv(box, box, 3), nn.Conv2d(box, 4 * bins, 1))
            for c in channels
        )
        self.cv3 = nn.ModuleList(
            nn.Sequential(*self.class_layers(c, kind, light), nn.Conv2d(kind, classes, 1))
            for c in channels
        )
        self.dfl: nn.Module = Distribution() if bins > 1 else nn.Identity()
        if one_to_one:
            self.one2one_cv2, self.one2one_cv3 = copy.deepcopy(self.cv2), copy.deepcopy(self.cv3)

    @staticmethod
    def class_layers(inputs: int, width: int, light: bool) -> list[nn.Module]:
        """Return the two hidden layers of a class branch."""
        if not light:
            return [Conv(inputs, width, 3), Conv(width, width, 3)]
        return [
            nn.Sequential(Conv(inputs, inputs, 3, groups=inputs), Conv(inputs, width)),
            nn.Sequential(Conv(width, width, 3, groups=width), Conv(width, width)),
        ]

    def branches(self) -> list[tuple[nn.ModuleList, nn.ModuleList]]:
        """Return the box and the class branches, of one-to-many and, if there are such, of one-to-one."""
        own = [(self.cv2, self.cv3)]
        return [*own, (self.one2one_cv2, self.one2one_cv3)] if self.one_to_one else own

    def start(self, image_size: int, box_bias: float) -> None:
        """Set the biases so that training starts from few detections: about 5 objects in a picture of this size."""
        for boxes, kinds in self.branches():
            for box, kind, stride in zip(boxes, kinds, self.strides, strict=True):
                with torch.no_grad():
                    box[-1].bias.fill_(box_bias)  # type: ignore[index]
                    kind[-1].bias.fill_(math.log(5 / self.classes / (image_size / stride) ** 2))  # type: ignore[index]

    def forward(self, *maps_bchw: Tensor) -> list[Tensor]:
        """Return (b, 4 * bins + classes, h, w) logits per level, of both pairs of branches in training."""
        if not self.one_to_one or not (self.training or self.answers_once):
            return levels(maps_bchw, self.cv2, self.cv3)
        if not self.training:
            return levels(maps_bchw, self.one2one_cv2, self.one2one_cv3)
        apart = [one.detach() for one in maps_bchw]
        return levels(maps_bchw, self.cv2, self.cv3) + levels(
            apart, self.one2one_cv2, self.one2one_cv3
        )


def levels(
    maps_bchw: Sequence[Tensor], boxes: Iterable[nn.Module], kinds: Iterable[nn.Module]
) -> list[Tensor]:
    """Return the outputs of box and class branches behind each other, per level."""
    return [
        torch.cat((box(x), kind(x)), 1)
        for x, box, kind in zip(maps_bchw, boxes, kinds, strict=True)
    ]


def flatten(raw: Sequence[Tensor], bins: int = BINS) -> tuple[Tensor, Tensor]:
    """Return box logits (b, p, 4 * bins) and class logits (b, p, classes) of all levels."""
    joined = torch.cat([level.flatten(2) for level in raw], 2).transpose(1, 2)
    return joined[..., : 4 * bins], joined[..., 4 * bins :]


def places(raw: Sequence[Tensor], strides: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the places' centres (p, 2) as x and y in strides, and their strides (p, 1)."""
    centres, steps = [], []
    for level, stride in zip(raw, strides, strict=True):
        height, width = level.shape[2:]
        dtype = torch.float64 if level.dtype == torch.float64 else torch.float32
        y = torch.arange(height, device=level.device, dtype=dtype) + 0.5
        x = torch.arange(width, device=level.device, dtype=dtype) + 0.5
        rows, columns = y[:, None].expand(height, width), x[None, :].expand(height, width)
        centres.append(torch.stack((columns, rows), 2).flatten(0, 1))
        steps.append(
            torch.full((height * width, 1), float(stride), device=level.device, dtype=dtype)
        )
    return torch.cat(centres), torch.cat(steps)


def corners(boxes_bpn: Tensor, centres: Tensor, bins: int = BINS) -> Tensor:
    """Return boxes (b, p, 4) as left, top, right, bottom in strides from the logits of their distances.

    With one bin they are the distances.
    """
    distances = boxes_bpn
    if bins > 1:
        distribution = boxes_bpn.reshape(*boxes_bpn.shape[:2], 4, bins).softmax(3)
        distances = distribution @ torch.arange(
            bins, device=boxes_bpn.device, dtype=boxes_bpn.dtype
        )
    before, after = distances.chunk(2, 2)
    return torch.cat((centres - before, centres + after), 2)


def decode(
    raw: Sequence[Tensor], strides: Sequence[int], bins: int = BINS
) -> tuple[Tensor, Tensor]:
    """Return boxes (b, p, 4) as left, top, right, bottom in pixels and probabilities (b, p, classes)."""
    wide = [level if level.dtype == torch.float64 else level.float() for level in raw]
    centres, steps = places(wide, strides)
    boxes, kinds = flatten(wide, bins)
    return corners(boxes, centres, bins) * steps, kinds.sigmoid()
