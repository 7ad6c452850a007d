"""The flow blocks of RIFE's published versions, under the names and in the shapes of their files.

A block works at 1/scale of the frame: it shrinks its input, halves that twice more, and enlarges its result to full
size. Flows are 4 channels, x and y into frame 0, then into frame 1, in pixels of full size. What it returns is float32
in every precision mode: flows are sums over blocks, and in float16 a flow of 16 pixels is rounded to 1/64 pixel.

Names (`conv0`, `convblock`, `lastconv`, `beta`) are those of the files.

Source: hzwer/ECCV2022-RIFE, hzwer/Practical-RIFE and HolyWu/vs-rife (all MIT); written from a description of their
networks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpt.systems.dain.nn.operators.regions import raised
from mpt.systems.dain.nn.operators.resizing import resized

BODY_LAYERS = 8
SLOPE = 0.2
Activation = Callable[[int], nn.Module]


class Refined(NamedTuple):
    """What a block adds to flow and mask (before the sigmoid), and its features for the next block."""

    flow_b4hw: Tensor
    mask_b1hw: Tensor
    features_bchw: Tensor


def prelu(channels: int) -> nn.Module:
    """Return a rectifier whose slope is learnt per channel."""
    return nn.PReLU(channels)


def leaky(channels: int) -> nn.Module:
    """Return a rectifier of slope 0.2."""
    return nn.LeakyReLU(SLOPE)


def convolution(
    inputs: int, outputs: int, activation: Activation, stride: int = 1
) -> nn.Sequential:
    """Return a 3 x 3 convolution and its activation."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), activation(outputs))


class FlowBlock(nn.Module):
    """Stem, body and last layer; subclasses say which, and by how much the result is enlarged to 1/scale."""

    enlarged = 1

    def __init__(self, inputs: int, width: int, activation: Activation) -> None:
        super().__init__()
        self.conv0 = nn.Sequential(
            convolution(inputs, width // 2, activation, 2),
            convolution(width // 2, width, activation, 2),
        )

    def forward(self, seen_bchw: Tensor, flow_b4hw: Tensor | None, scale: float) -> Refined:
        """Return the refinement at full size."""
        x = resized(seen_bchw, 1 / scale)
        if flow_b4hw is not None:
            x = torch.cat((x, (resized(flow_b4hw, 1 / scale) / scale).to(x.dtype)), dim=1)
        factor = scale * self.enlarged
        made = resized(raised(self.estimate(self.conv0(x))), factor)
        return Refined(made[:, :4] * factor, made[:, 4:5], made[:, 5:])

    def estimate(self, x_bchw: Tensor) -> Tensor:
        """Return flow, mask and features (b, 5 or more, h, w), the flow in pixels of this size."""
        raise NotImplementedError


class PlainBlock(FlowBlock):
    """Eight convolutions with one shortcut around them: the ECCV networks and 4.0. Without it and with fixed slopes
    4.2 to 4.4."""

    enlarged = 2

    def __init__(
        self, inputs: int, width: int, activation: Activation = prelu, shortcut: bool = True
    ) -> None:
        super().__init__(inputs, width, activation)
        self.shortcut = shortcut
        self.convblock = nn.Sequential(
            *(convolution(width, width, activation) for _ in range(BODY_LAYERS))
        )
        self.lastconv = nn.ConvTranspose2d(width, 5, 4, 2, 1)

    def estimate(self, x_bchw: Tensor) -> Tensor:
        """Return flow and mask at twice the size of x."""
        body = self.convblock(x_bchw)
        made: Tensor = self.lastconv(body + x_bchw if self.shortcut else body)
        return made


class PairedBlock(FlowBlock):
    """Four pairs of convolutions with a shortcut each, and a last layer each for flow and mask; HD 3.x.

    In the older version the last layers are two in a row, which double the size twice.
    """

    def __init__(self, inputs: int, width: int, older: bool) -> None:
        super().__init__(inputs, width, prelu)
        self.enlarged = 1 if older else 2
        for number in range(4):
            pair = nn.Sequential(convolution(width, width, prelu), convolution(width, width, prelu))
            setattr(self, f"convblock{number}", pair)
        self.conv1 = (
            enlarging_twice(width, 4)
            if older
            else nn.Sequential(nn.ConvTranspose2d(width, 4, 4, 2, 1))
        )
        self.conv2 = enlarging_twice(width, 1) if older else nn.ConvTranspose2d(width, 1, 4, 2, 1)

    def estimate(self, x_bchw: Tensor) -> Tensor:
        """Return flow and mask."""
        x = x_bchw
        for number in range(4):
            x = getattr(self, f"convblock{number}")(x) + x
        return torch.cat((self.conv1(x), self.conv2(x)), dim=1)


def enlarging_twice(width: int, outputs: int) -> nn.Sequential:
    """Return two transposed convolutions of stride 2 with a rectifier between them."""
    half = width // 2
    return nn.Sequential(
        nn.ConvTranspose2d(width, half, 4, 2, 1),
        nn.PReLU(half),
        nn.ConvTranspose2d(half, outputs, 4, 2, 1),
    )


class ScaledResidual(nn.Module):
    """A convolution times a learnt factor per channel, its input added, then the rectifier."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, 1, 1, groups=groups)
        self.beta = nn.Parameter(torch.ones(1, width, 1, 1))

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return (b, c, h, w)."""
        return F.leaky_relu(self.conv(x_bchw) * self.beta + x_bchw, SLOPE)


class ResidualBlock(FlowBlock):
    """Eight scaled residuals, then a transposed convolution and a pixel shuffle by 2; 4.5 and later."""

    def __init__(self, inputs: int, width: int, outputs: int, groups: int = 1) -> None:
        super().__init__(inputs, width, leaky)
        self.convblock = nn.Sequential(*(ScaledResidual(width, groups) for _ in range(BODY_LAYERS)))
        self.lastconv = nn.Sequential(
            nn.ConvTranspose2d(width, 4 * outputs, 4, 2, 1), nn.PixelShuffle(2)
        )

    def estimate(self, x_bchw: Tensor) -> Tensor:
        """Return flow, mask and features at four times the size of x."""
        made: Tensor = self.lastconv(self.convblock(x_bchw))
        return made


class Head(nn.Module):
    """Features of one frame, at its size; the encoder of 4.13 and later."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.cnn0 = nn.Conv2d(3, width, 3, 2, 1)
        self.cnn1 = nn.Conv2d(width, width, 3, 1, 1)
        self.cnn2 = nn.Conv2d(width, width, 3, 1, 1)
        self.cnn3 = nn.ConvTranspose2d(width, outputs, 4, 2, 1)

    def forward(self, image_bchw: Tensor) -> Tensor:
        """Return (b, c, h, w)."""
        x = image_bchw.clamp(0, 1)
        for layer in (self.cnn0, self.cnn1, self.cnn2):
            x = F.leaky_relu(layer(x), SLOPE)
        made: Tensor = self.cnn3(x)
        return made


def encoder_in_a_row(width: int, outputs: int) -> nn.Sequential:
    """Return the layers of `Head` under the names of 4.10 to 4.12."""
    layers: list[nn.Module] = []
    for inputs, stride in ((3, 2), (width, 1), (width, 1)):
        layers += convolution(inputs, width, leaky, stride)
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, outputs, 4, 2, 1))


def encoder_of_two(width: int, outputs: int) -> nn.Sequential:
    """Return the encoder of 4.7 to 4.9: two layers, nothing between them."""
    return nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ConvTranspose2d(width, outputs, 4, 2, 1))
