"""Layers of the DEYOLO and DEFA fusions: the bi-directional focus and the two-way enhancement of the two cameras' maps.

Source: Chen et al., "DEYOLO: dual-feature-enhancement YOLO for cross-modality object detection", ICPR 2024, sections
3.2 (DECA, DEPA) and 3.3 (bi-directional decoupled focus). The published convolution pyramid of DECA runs only on maps
that are at least as large as those of a 640-pixel input; smaller maps get a plain mean, as in the published program.

DEFA has been published as a program only. Its parameters' names and shapes are known, its arithmetic is not: `DEFA`
here is our own reading of those names, equal in parameters and not tested for equal outputs.

Shape suffixes: b batch, c channels, h height, w width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpt.systems.yolofuse.nn.layers.yolo_blocks import C2f, Conv

REDUCTION = 16
PYRAMID = (5, 4)
"""Kernel and stride of the pyramid's first two convolutions; the third takes the rest of the map."""


class Focus(nn.Module):
    """Sample the map like a checkerboard into two maps of half the width (or height), convolve each, put them back."""

    def __init__(self, channels: int, across: bool) -> None:
        super().__init__()
        self.across = across
        self.conv1, self.conv2 = Conv(channels, channels, 3), Conv(channels, channels, 3)

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the focused map. Height and width must be even."""
        x = x_bchw if self.across else x_bchw.transpose(2, 3)
        even, odd = x[:, :, ::2], x[:, :, 1::2]
        # Of even rows the even columns and of odd rows the odd ones; the second map holds the others.
        first = self.along(
            torch.stack((even[..., ::2], odd[..., 1::2]), 3).flatten(2, 3), self.conv1
        )
        second = self.along(
            torch.stack((even[..., 1::2], odd[..., ::2]), 3).flatten(2, 3), self.conv2
        )
        even = torch.stack((first[:, :, ::2], second[:, :, ::2]), 4).flatten(3, 4)
        odd = torch.stack((second[:, :, 1::2], first[:, :, 1::2]), 4).flatten(3, 4)
        y = torch.stack((even, odd), 3).flatten(2, 3)
        return y if self.across else y.transpose(2, 3)

    def along(self, half: Tensor, convolution: nn.Module) -> Tensor:
        """Convolve with the kernel upright, whichever way the map lies."""
        y: Tensor = (
            convolution(half) if self.across else convolution(half.transpose(2, 3)).transpose(2, 3)
        )
        return y


class DepthWise(nn.Module):
    """A depthwise 3x3 and a 1x1."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.depth_conv, self.point_conv = (
            Conv(inputs, inputs, 3, groups=inputs),
            Conv(inputs, outputs),
        )

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the block's output."""
        y: Tensor = self.point_conv(self.depth_conv(x_bchw))
        return y


class BiFocus(nn.Module):
    """The map alongside its two focused versions, mixed."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.focus_h, self.focus_v = Focus(channels, True), Focus(channels, False)
        self.depth_wise = DepthWise(3 * channels, channels)

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the block's output."""
        y: Tensor = self.depth_wise(
            torch.cat((x_bchw, self.focus_h(x_bchw), self.focus_v(x_bchw)), 1)
        )
        return y


class C2fBiFocus(C2f):
    """C2f with a bi-directional focus behind it. Its bottlenecks have no skip, unlike those of YOLOv8's backbone."""

    def __init__(self, inputs: int, outputs: int, repeats: int = 1) -> None:
        super().__init__(inputs, outputs, repeats, False)
        self.bifocus = BiFocus(outputs)

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the block's output."""
        y: Tensor = self.bifocus(super().forward(x_bchw))
        return y


class ChannelEnhancement(nn.Module):
    """DECA: each camera's channels are weighted by the other camera and by both together."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.fc = nn.Sequential(
            nn.Linear(channels, channels // REDUCTION, bias=False),
            nn.ReLU(),
            nn.Linear(channels // REDUCTION, channels, bias=False),
            nn.Sigmoid(),
        )
        self.compress = Conv(2 * channels, channels, 3)
        first, second = PYRAMID
        self.conv_c1 = self.step(channels, first)
        self.conv_c2 = self.step(channels, second)
        self.conv_c3 = self.step(channels, side // first // second)

    def step(self, channels: int, kernel: int) -> nn.Sequential:
        """Return one depthwise convolution of the pyramid."""
        return nn.Sequential(
            nn.Conv2d(channels, channels, kernel, kernel, groups=channels), nn.SiLU()
        )

    def forward(self, visible_bchw: Tensor, infrared_bchw: Tensor) -> tuple[Tensor, Tensor]:
        """Return both maps, enhanced."""
        weights = [self.fc(x.mean((2, 3)))[:, :, None, None] for x in (visible_bchw, infrared_bchw)]
        both = self.compress(torch.cat((visible_bchw, infrared_bchw), 1))
        if min(both.shape[2:]) >= self.side:
            both = self.conv_c3(self.conv_c2(self.conv_c1(both)))
        else:
            both = both.mean((2, 3), keepdim=True)
        return visible_bchw * torch.sigmoid(weights[1] * both), infrared_bchw * torch.sigmoid(
            weights[0] * both
        )


class PixelEnhancement(nn.Module):
    """DEPA: each camera's places are weighted by the other camera and by both together."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = Conv(2, 1, 5), Conv(2, 1, 5)
        self.compress1, self.compress2 = Conv(channels, 1, 3), Conv(channels, 1, 3)
        self.cv_v1, self.cv_v2 = Conv(channels, 1, 3), Conv(channels, 1, 7)
        self.cv_i1, self.cv_i2 = Conv(channels, 1, 3), Conv(channels, 1, 7)

    def forward(self, visible_bchw: Tensor, infrared_bchw: Tensor) -> tuple[Tensor, Tensor]:
        """Return both maps, enhanced."""
        visible = self.conv1(torch.cat((self.cv_v1(visible_bchw), self.cv_v2(visible_bchw)), 1))
        infrared = self.conv2(torch.cat((self.cv_i1(infrared_bchw), self.cv_i2(infrared_bchw)), 1))
        both = torch.sigmoid(self.compress1(visible_bchw) + self.compress2(infrared_bchw))
        return visible_bchw * torch.sigmoid(both + infrared), infrared_bchw * torch.sigmoid(
            both + visible
        )


class DEA(nn.Module):
    """Channels, then places, then the sigmoid of the sum of both cameras."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.deca, self.depa = ChannelEnhancement(channels, side), PixelEnhancement(channels)

    def forward(self, visible_bchw: Tensor, infrared_bchw: Tensor) -> Tensor:
        """Return one map of both cameras."""
        visible, infrared = self.depa(*self.deca(visible_bchw, infrared_bchw))
        return torch.sigmoid(visible + infrared)


class DEFA(nn.Module):
    """A gated sum of the cameras, filtered by a kernel made from the input, with attention between pooled places."""

    POOLED = 8
    """Side of the pooled maps between which there is attention, so that its cost does not depend on the input's."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.dynamic_conv = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, 4 * channels, 1),
            nn.SiLU(),
            nn.Conv2d(4 * channels, 25, 1),
        )
        self.cross_attn = nn.MultiheadAttention(channels, max(1, channels // 64), batch_first=True)
        hidden = max(1, channels // side)
        self.gate = nn.Sequential(
            nn.Conv2d(2 * channels, hidden, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(hidden, 2, 3, padding=1),
            nn.Softmax(1),
        )
        self.enhance = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.SiLU()
        )

    def forward(self, visible_bchw: Tensor, infrared_bchw: Tensor) -> Tensor:
        """Return one map of both cameras."""
        share = self.gate(torch.cat((visible_bchw, infrared_bchw), 1))
        mixed = share[:, :1] * visible_bchw + share[:, 1:] * infrared_bchw
        kernel = self.dynamic_conv(mixed).softmax(1)
        batch, channels, height, width = mixed.shape
        padded = functional.pad(mixed, (2, 2, 2, 2))
        filtered = torch.zeros_like(mixed)
        for place in range(25):
            row, column = divmod(place, 5)
            window = padded[:, :, row : row + height, column : column + width]
            filtered = filtered + kernel[:, place : place + 1] * window
        seen = [
            functional.adaptive_avg_pool2d(x, self.POOLED).flatten(2).transpose(1, 2)
            for x in (visible_bchw, infrared_bchw)
        ]
        attended, _ = self.cross_attn(seen[0], seen[1], seen[1], need_weights=False)
        attended = attended.transpose(1, 2).reshape(batch, channels, self.POOLED, self.POOLED)
        attended = functional.interpolate(attended, size=(height, width))
        y: Tensor = self.enhance(filtered + attended)
        return y
