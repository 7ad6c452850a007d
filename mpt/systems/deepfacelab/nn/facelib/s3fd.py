"""S3FD: finds faces (Zhang et al., "S3FD: Single Shot Scale-Invariant Face Detector", 2017), as DeepFaceLab runs it.

A VGG16 whose stages, three of them normalised per pixel, each say for every place whether a face of four strides' size
is there and its box. Legend: b batch, c channels, h height, w width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Boxes = np.ndarray[Any, np.dtype[Any]]
STAGES = (
    ("conv1", (3, 64, 64)),
    ("conv2", (64, 128, 128)),
    ("conv3", (128, 256, 256, 256)),
    ("conv4", (256, 512, 512, 512)),
    ("conv5", (512, 512, 512, 512)),
)
NORMALISED = {"conv3": 256, "conv4": 512, "conv5": 512}
HEADS = {
    "conv3_3_norm": (256, 4),
    "conv4_3_norm": (512, 2),
    "conv5_3_norm": (512, 2),
    "fc7": (1024, 2),
    "conv6_2": (512, 2),
    "conv7_2": (256, 2),
}
"""Maps with a head: channels, and logits of whether there is a face."""
MEANS = (104.0, 117.0, 123.0)
CANDIDATE, OVERLAP, SCORE = 0.05, 0.3, 0.5
SMALLEST = 40
"""Faces below that many pixels of the picture are not returned."""


class Norm(nn.Module):
    """Scale each place's vector to a learnt length per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x_bchw: Tensor) -> Tensor:
        length = x_bchw.square().sum(dim=1, keepdim=True).sqrt() + 1e-10
        return x_bchw / length * self.weight[None, :, None, None]


class S3FD(nn.Module):
    """Pictures (b 3 h w), R, G, B from 0 to 255, to chances of a face and offsets of its box at strides 4 to 128."""

    def __init__(self) -> None:
        super().__init__()
        for stage, widths in STAGES:
            for number, (before, after) in enumerate(itertools.pairwise(widths), start=1):
                self.add_module(f"{stage}_{number}", nn.Conv2d(before, after, 3, padding=1))
        self.fc6 = nn.Conv2d(512, 1024, 3, padding=3)
        self.fc7 = nn.Conv2d(1024, 1024, 1)
        self.conv6_1, self.conv6_2 = nn.Conv2d(1024, 256, 1), nn.Conv2d(256, 512, 3, 2, 1)
        self.conv7_1, self.conv7_2 = nn.Conv2d(512, 128, 1), nn.Conv2d(128, 256, 3, 2, 1)
        for stage, channels in NORMALISED.items():
            self.add_module(f"{stage}_3_norm", Norm(channels))
        for name, (channels, logits) in HEADS.items():
            self.add_module(f"{name}_mbox_conf", nn.Conv2d(channels, logits, 3, padding=1))
            self.add_module(f"{name}_mbox_loc", nn.Conv2d(channels, 4, 3, padding=1))

    def forward(self, picture_b3hw: Tensor) -> list[tuple[Tensor, Tensor]]:
        x = picture_b3hw - picture_b3hw.new_tensor(MEANS)[None, :, None, None]
        found: dict[str, Tensor] = {}
        for stage, widths in STAGES:
            for number in range(1, len(widths)):
                x = F.relu(self.get_submodule(f"{stage}_{number}")(x))
            if stage in NORMALISED:
                found[f"{stage}_3_norm"] = self.get_submodule(f"{stage}_3_norm")(x)
            x = F.max_pool2d(x, 2)
        x = found["fc7"] = F.relu(self.fc7(F.relu(self.fc6(x))))
        x = found["conv6_2"] = F.relu(self.conv6_2(F.relu(self.conv6_1(x))))
        found["conv7_2"] = F.relu(self.conv7_2(F.relu(self.conv7_1(x))))
        return [self.head(name, features) for name, features in found.items()]

    def head(self, name: str, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chance of a face (b 2 h w, background first) and the offsets (b 4 h w) at one stride."""
        logits = self.get_submodule(f"{name}_mbox_conf")(features)
        background = logits[:, :-1].amax(dim=1, keepdim=True)
        chances = torch.cat((background, logits[:, -1:]), dim=1).softmax(dim=1)
        return chances, self.get_submodule(f"{name}_mbox_loc")(features)


def decode(outputs: Sequence[tuple[Boxes, Boxes]]) -> Boxes:
    """Return boxes (n, 5), left, top, right, bottom and score, of chances (h, w, 2) and offsets (h, w, 4)."""
    boxes = []
    for number, (chances, offsets) in enumerate(outputs):
        stride = 2 ** (number + 2)
        rows, columns = np.nonzero(chances[..., 1] > CANDIDATE)
        places = np.stack((columns, rows), 1) * stride + stride / 2
        moved = offsets[rows, columns]
        side = stride * 4
        middle, size = places + moved[:, :2] * 0.1 * side, side * np.exp(moved[:, 2:] * 0.2)
        start = middle - size / 2
        boxes.append(np.column_stack((start, start + size, chances[rows, columns, 1])))
    return np.concatenate(boxes)


def suppress(boxes: Boxes) -> list[int]:
    """Return the indexes of boxes, best first, of which none covers a better one by more than `OVERLAP`."""
    left, top, right, bottom, score = boxes.T
    areas = (right - left + 1) * (bottom - top + 1)
    order, kept = score.argsort()[::-1], []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(int(best))
        width = np.minimum(right[best], right[order]) - np.maximum(left[best], left[order]) + 1
        height = np.minimum(bottom[best], bottom[order]) - np.maximum(top[best], top[order]) + 1
        common = width.clip(0) * height.clip(0)
        order = order[common / (areas[best] + areas[order] - common) <= OVERLAP]
    return kept


def refine(outputs: Sequence[tuple[Boxes, Boxes]]) -> Boxes:
    """Return whole-numbered boxes (n, 4) of faces, best first."""
    boxes = decode(outputs)
    boxes = boxes[suppress(boxes)] if len(boxes) else boxes
    return boxes[boxes[:, 4] >= SCORE, :4].astype(int)


def input_scale(height: int, width: int) -> float:
    """Return by how much a picture is shrunk before faces are looked for: to 640 pixels, or to half, at least 64."""
    longest = max(height, width)
    return longest / max(64, 640 if longest >= 1280 else longest / 2)


def choose(boxes: Boxes, scale: float) -> list[tuple[int, int, int, int]]:
    """Return boxes of the picture, largest first, their lower edge a tenth further down."""
    found = []
    for left, top, right, bottom in boxes * scale:
        if min(right - left, bottom - top) >= SMALLEST:
            found.append((int(left), int(top), int(right), int(bottom + (bottom - top) * 0.1)))
    found.sort(key=lambda box: (box[2] - box[0]) * (box[3] - box[1]), reverse=True)
    return found
