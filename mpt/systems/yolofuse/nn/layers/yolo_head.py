"""The anchor-free detection head, and what its maps mean in pixels.

Per level the head gives 4 x 16 logits of the distances from a place to the left, top, right and bottom sides of its
box, in strides, as a distribution over 0 to 15, and one logit per class. Source: Li et al., "Generalized focal loss",
2020, for the distribution; Feng et al., "TOOD", 2021, for the places.

`decode` runs in float32 (or float64): half precision has steps of a quarter of a pixel at 512.
Shape suffixes: b batch, c channels, h height, w width, p places (all levels one after the other, row by row).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mpt.systems.yolofuse.nn.layers.yolo_blocks import Conv

BINS = 16


class Distribution(nn.Module):
    """The fixed kernel 0..15 that turns a distribution into its mean. A frozen parameter, as published."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(BINS, 1, 1, bias=False)
        self.conv.weight = nn.Parameter(torch.arange(float(BINS)).view(1, BINS, 1, 1), requires_grad=False)


class Detect(nn.Module):
    """Box and class branches for each level. `light` uses depthwise convolutions in the class branch (YOLO11)."""

    def __init__(
        self, channels: Sequence[int], classes: int, strides: Sequence[int], light: bool, box_bias: float = 1.0
    ) -> None:
        super().__init__()
        self.classes, self.strides = classes, tuple(strides)
        box = max(16, channels[0] // 4, 4 * BINS)
        kind = max(channels[0], min(classes, 100))
        self.cv2 = nn.ModuleList(
            nn.Sequential(Conv(c, box, 3), Conv(box, box, 3), nn.Conv2d(box, 4 * BINS, 1)) for c in channels
        )
        self.cv3 = nn.ModuleList(
            nn.Sequential(*self.class_layers(c, kind, light), nn.Conv2d(kind, classes, 1)) for c in channels
        )
        self.dfl = Distribution()
        self.box_bias = box_bias

    @staticmethod
    def class_layers(inputs: int, width: int, light: bool) -> list[nn.Module]:
        """Return the two hidden layers of a class branch."""
        if not light:
            return [Conv(inputs, width, 3), Conv(width, width, 3)]
        return [
            nn.Sequential(Conv(inputs, inputs, 3, groups=inputs), Conv(inputs, width)),
            nn.Sequential(Conv(width, width, 3, groups=width), Conv(width, width)),
        ]

    def start(self, image_size: int) -> None:
        """Set the biases so that training starts from few detections: about 5 objects in a picture of this size."""
        for box, kind, stride in zip(self.cv2, self.cv3, self.strides, strict=True):
            with torch.no_grad():
                box[-1].bias.fill_(self.box_bias)  # type: ignore[index]
                kind[-1].bias.fill_(math.log(5 / self.classes / (image_size / stride) ** 2))  # type: ignore[index]

    def forward(self, *maps_bchw: Tensor) -> list[Tensor]:
        """Return (b, 64 + classes, h, w) logits per level."""
        return [torch.cat((box(x), kind(x)), 1) for x, box, kind in zip(maps_bchw, self.cv2, self.cv3, strict=True)]


def flatten(raw: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return box logits (b, p, 64) and class logits (b, p, classes) of all levels."""
    joined = torch.cat([level.flatten(2) for level in raw], 2).transpose(1, 2)
    return joined[..., : 4 * BINS], joined[..., 4 * BINS :]


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
        steps.append(torch.full((height * width, 1), float(stride), device=level.device, dtype=dtype))
    return torch.cat(centres), torch.cat(steps)


def corners(boxes_bp64: Tensor, centres: Tensor) -> Tensor:
    """Return boxes (b, p, 4) as left, top, right, bottom in strides from the logits of their distances."""
    distribution = boxes_bp64.reshape(*boxes_bp64.shape[:2], 4, BINS).softmax(3)
    distances = distribution @ torch.arange(BINS, device=boxes_bp64.device, dtype=boxes_bp64.dtype)
    before, after = distances.chunk(2, 2)
    return torch.cat((centres - before, centres + after), 2)


def decode(raw: Sequence[Tensor], strides: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return boxes (b, p, 4) as left, top, right, bottom in pixels and probabilities (b, p, classes)."""
    wide = [level if level.dtype == torch.float64 else level.float() for level in raw]
    centres, steps = places(wide, strides)
    boxes, kinds = flatten(wide)
    return corners(boxes, centres) * steps, kinds.sigmoid()
