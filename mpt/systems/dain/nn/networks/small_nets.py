"""DAIN's parts at a size that learns on a CPU in minutes: two flow levels, a shallow U-Net for depth and for kernels.

What differs from the full parts beyond width: features are normalised per image before their correlation (with a rsqrt
of variance + eps: the gradient of a standard deviation is NaN at zero); the last layers start such that the network
begins as bilinear warping along a zero flow (kernel taps 1 at the four inner places, no rectification, depth 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from mpt.systems.dain.nn.networks.flow_net import UNITS_PER_PIXEL, convolution
from mpt.systems.dain.nn.operators.regions import CorrelationRegion, WarpRegion, raised
from mpt.systems.dain.nn.operators.resizing import resized

INNER_TAPS = (5, 6, 9, 10)
"""Of 4 x 4 taps, the four around the target: with ones there the filter is bilinear interpolation."""


def standardised(x_bchw: Tensor) -> Tensor:
    """Return features with zero mean per channel and unit variance per image."""
    x = raised(x_bchw)
    x = x - x.mean((2, 3), keepdim=True)
    return (x * (x.square().mean((1, 2, 3), keepdim=True) + 1e-5).rsqrt()).to(x_bchw.dtype)


class SmallFlowNet(nn.Module):
    """Flow at 1/4 from two levels of cost volumes; sides are multiples of 8."""

    multiple = 8

    def __init__(self, pyramid: tuple[int, int, int] = (16, 32, 48)) -> None:
        super().__init__()
        before = 3
        for level, width in enumerate(pyramid, start=1):
            self.add_module(
                f"conv{level}",
                nn.Sequential(convolution(before, width, 2), convolution(width, width)),
            )
            before = width
        self.correlation, self.warp = CorrelationRegion(), WarpRegion(masked=False)
        self.decode3 = nn.Sequential(
            convolution(81 + pyramid[2], 64), convolution(64, 32), nn.Conv2d(32, 2, 3, 1, 1)
        )
        self.decode2 = nn.Sequential(
            convolution(81 + pyramid[1] + 2, 64), convolution(64, 32), nn.Conv2d(32, 2, 3, 1, 1)
        )
        for decoder in (self.decode3, self.decode2):
            nn.init.zeros_(decoder[-1].weight)  # type: ignore[arg-type]
            nn.init.zeros_(decoder[-1].bias)  # type: ignore[arg-type]

    def forward(self, frames_b6hw: Tensor, both_ways: bool = False) -> Tensor:
        """Return the flow (b, 2, h/4, w/4) in units of 1/20 of an input pixel; `both_ways` as `FlowNet`'s."""
        batch = len(frames_b6hw)
        maps = [
            (x[:batch], x[batch:])
            for x in self.features(torch.cat((frames_b6hw[:, :3], frames_b6hw[:, 3:])))
        ]
        if both_ways:
            maps = [(torch.cat((one, other)), torch.cat((other, one))) for one, other in maps]
        return self.decode(*maps)

    def features(self, image_b3hw: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features at 1/4 and 1/8."""
        fourth = self.get_submodule("conv2")(self.get_submodule("conv1")(image_b3hw))
        return fourth, self.get_submodule("conv3")(fourth)

    def decode(self, maps2: tuple[Tensor, Tensor], maps3: tuple[Tensor, Tensor]) -> Tensor:
        """Return the flow from both frames' features at 1/4 and 1/8."""
        (first2, second2), (first3, second3) = maps2, maps3
        cost = self.correlation(standardised(first3), standardised(second3))
        flow3 = self.decode3(torch.cat((cost, first3), dim=1))  # in pixels of level 3
        up = 2 * resized(flow3, 2)
        warped = self.warp(second2, up)
        cost = self.correlation(standardised(first2), standardised(warped))
        flow2 = up + self.decode2(torch.cat((cost, first2, up), dim=1))
        in_units: Tensor = flow2 * (4 / UNITS_PER_PIXEL)
        return in_units


class SmallUnet(nn.Module):
    """Two halvings and back, with additive skips; sides are multiples of 4."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.down0, self.down1 = convolution(inputs, width), convolution(width, 2 * width, 2)
        self.down2 = convolution(2 * width, 4 * width, 2)
        self.up1, self.up0 = convolution(4 * width, 2 * width), convolution(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (b, width, h, w)."""
        zero = self.down0(x)
        one = self.down1(zero)
        two = self.up1(self.down2(one))
        one = resized(two, 2) + one
        result: Tensor = resized(self.up0(one), 2) + zero
        return result


class SmallDepthNet(nn.Sequential):
    """Log depth from one frame, 0 everywhere at the start."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(SmallUnet(3, width), nn.Conv2d(width, 1, 3, padding=1))
        nn.init.zeros_(self[1].weight)  # type: ignore[arg-type]


class SmallKernelTrunk(SmallUnet):
    """The features from which both frames' kernels are made."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(6, width)


def start_small(heads: Sequence[nn.Sequential], rectify: nn.Module) -> None:
    """Begin as bilinear warping without rectification."""
    for head in heads:
        last = cast(nn.Conv2d, head[-1])
        nn.init.zeros_(last.weight)
        assert last.bias is not None
        with torch.no_grad():
            last.bias.zero_()
            last.bias[list(INNER_TAPS)] = 1.0
    *_, added = (layer for layer in rectify.modules() if isinstance(layer, nn.Conv2d))
    nn.init.zeros_(added.weight)
    assert added.bias is not None
    nn.init.zeros_(added.bias)
