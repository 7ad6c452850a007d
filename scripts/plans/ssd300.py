"""SSD300 with a ResNet-50, as NVIDIA's DeepLearningExamples train it: the convolutions that its published times are of.

For `scripts/plans/check_times.py`: `model.name: scripts.plans.ssd300:Ssd300` with `--allow scripts`. The six feature
maps and their heads are there; in place of the loss over 8,732 boxes each class's scores are summed up to one logit, so
that the step is one of a classifier. What is missing of the loss passes some ten times over 8,732 x 85 numbers per
image.

Source of the sizes: NVIDIA/DeepLearningExamples, PyTorch/Detection/SSD/ssd/model.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpt import vision_ops

LABELS = 81
BOXES = (4, 6, 6, 6, 4, 4)
"""Boxes per place of each feature map, of 38, 19, 10, 5, 3 and 1 places a side."""
WIDTHS = (1024, 512, 512, 256, 256, 256)
INNER = (256, 256, 128, 128, 128)
HALVED = 3
"""So many of the further maps have half the side; the others lose their border."""


def narrowing(width: int, inner: int, out: int, is_halved: bool) -> nn.Sequential:
    """Return what makes the next, smaller feature map."""
    last = nn.Conv2d(
        inner, out, 3, stride=2 if is_halved else 1, padding=1 if is_halved else 0, bias=False
    )
    first = nn.Conv2d(width, inner, 1, bias=False)
    return nn.Sequential(
        first, nn.BatchNorm2d(inner), nn.ReLU(True), last, nn.BatchNorm2d(out), nn.ReLU(True)
    )


class Ssd300(nn.Module):
    """Images (b 3 300 300) to one logit per label, and zeros for the data set's further classes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.unused = num_classes - LABELS
        resnet = vision_ops.import_torchvision("models").resnet50(weights=None)
        self.backbone = nn.Sequential(*list(resnet.children())[:7])
        wide = self.backbone[-1][0]
        wide.conv2.stride = wide.downsample[0].stride = (1, 1)
        sizes = zip(WIDTHS, INNER, WIDTHS[1:], range(len(INNER)), strict=False)
        self.further = nn.ModuleList(
            narrowing(width, inner, out, at < HALVED) for width, inner, out, at in sizes
        )
        heads = list(zip(WIDTHS, BOXES, strict=True))
        self.places = nn.ModuleList(
            nn.Conv2d(width, boxes * 4, 3, padding=1) for width, boxes in heads
        )
        self.labels = nn.ModuleList(
            nn.Conv2d(width, boxes * LABELS, 3, padding=1) for width, boxes in heads
        )

    def forward(self, image_bchw: Tensor) -> Tensor:
        """Return logits."""
        maps = [self.backbone(image_bchw)]
        for block in self.further:
            maps.append(block(maps[-1]))
        places = [
            head(one).reshape(len(one), 4, -1) for head, one in zip(self.places, maps, strict=True)
        ]
        labels = [
            head(one).reshape(len(one), LABELS, -1)
            for head, one in zip(self.labels, maps, strict=True)
        ]
        logits: Tensor = (
            torch.cat(labels, 2).logsumexp(2) + torch.cat(places, 2).mean((1, 2))[:, None]
        )
        return functional.pad(logits, (0, self.unused))
