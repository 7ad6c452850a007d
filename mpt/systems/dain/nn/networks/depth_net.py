"""MegaDepth's hourglass of inception blocks: log depth from one frame.

Layer positions in the nested sequences are those of the published weights. The first BatchNorm alone has a scale and
a shift. Pooling is by maximum at the two outer levels and by mean at the two inner ones; enlarging repeats pixels;
both branches of a level are added. Heights and widths are multiples of 16.

Source: Li and Snavely, "MegaDepth", 2018; the hourglass is that of Chen et al., "Single-Image Depth Perception in the
Wild", 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

Branches = tuple[int, tuple[tuple[int, int, int], ...]]
"""Of an inception block: the width of the 1 x 1 branch, then (kernel, inner width, width) of the three others."""


def branches(width: int, inner: int, kernels: tuple[int, int, int] = (3, 5, 7)) -> Branches:
    """Return the branches of a block of which each makes `width` channels."""
    return width, tuple((kernel, inner, width) for kernel in kernels)


WIDE = (3, 7, 11)


class Inception(nn.ModuleList):
    """Four branches side by side: 1 x 1, and three of 1 x 1 then k x k; each with BatchNorm and ReLU."""

    def __init__(self, inputs: int, sizes: Branches) -> None:
        width, others = sizes
        super().__init__([nn.Sequential(nn.Conv2d(inputs, width, 1), norm(width), nn.ReLU())])
        for kernel, inner, outer in others:
            self.append(
                nn.Sequential(
                    nn.Conv2d(inputs, inner, 1),
                    norm(inner),
                    nn.ReLU(),
                    nn.Conv2d(inner, outer, kernel, padding=kernel // 2),
                    norm(outer),
                    nn.ReLU(),
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the branches' outputs joined along channels."""
        return torch.cat([branch(x) for branch in self], dim=1)


class Level(nn.ModuleList):
    """Two branches whose outputs are added. Its one member is the list of both, as in the published names."""

    def __init__(self, one: Sequence[nn.Module], other: Sequence[nn.Module]) -> None:
        super().__init__([nn.ModuleList([nn.Sequential(*one), nn.Sequential(*other)])])

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        pair = cast(nn.ModuleList, self[0])
        result: Tensor = pair[0](x) + pair[1](x)
        return result


def norm(width: int) -> nn.BatchNorm2d:
    """Return BatchNorm without scale and shift."""
    return nn.BatchNorm2d(width, affine=False)


def hourglass() -> Level:
    """Return the four nested levels between 128 and 64 channels."""
    plain = branches(64, 32)
    level4 = Level(
        [Inception(256, plain), Inception(256, plain)],
        [
            nn.AvgPool2d(2),
            *(Inception(256, plain) for _ in range(3)),
            nn.UpsamplingNearest2d(scale_factor=2),
        ],
    )
    level3 = Level(
        [Inception(256, plain), Inception(256, branches(64, 64, WIDE))],
        [
            nn.AvgPool2d(2),
            Inception(256, plain),
            Inception(256, plain),
            level4,
            Inception(256, plain),
            Inception(256, branches(64, 64, WIDE)),
            nn.UpsamplingNearest2d(scale_factor=2),
        ],
    )
    level2 = Level(
        [
            nn.MaxPool2d(2),
            Inception(128, branches(32, 32)),
            Inception(128, plain),
            level3,
            Inception(256, plain),
            Inception(256, branches(32, 32)),
            nn.UpsamplingNearest2d(scale_factor=2),
        ],
        [Inception(128, branches(32, 32)), Inception(128, branches(32, 64, WIDE))],
    )
    return Level(
        [
            nn.MaxPool2d(2),
            Inception(128, branches(32, 32)),
            Inception(128, branches(32, 32)),
            level2,
            Inception(128, branches(32, 64)),
            Inception(128, branches(16, 32, WIDE)),
            nn.UpsamplingNearest2d(scale_factor=2),
        ],
        [Inception(128, branches(16, 64, WIDE))],
    )


class DepthNet(nn.Sequential):
    """Log depth (b, 1, h, w) of frames (b, 3, h, w) in [0, 1]."""

    multiple = 16

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 128, 7, padding=3),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            hourglass(),
            nn.Conv2d(64, 1, 3, padding=1),
        )
