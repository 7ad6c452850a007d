"""The context network and the U-Net of the ECCV networks, whose output is a residual on the blended frame.

Names are those of the files. Source: hzwer/ECCV2022-RIFE (MIT); written from a description of its networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from mpt.systems.dain.nn.operators.regions import WarpRegion
from mpt.systems.dain.nn.operators.resizing import resized
from mpt.systems.dain.nn.rife_published.blocks import convolution, prelu

WIDTH = 16


class Stage(nn.Module):
    """Two convolutions, of which the first halves the size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, outputs, prelu, 2)
        self.conv2 = convolution(outputs, outputs, prelu)

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return (b, outputs, h/2, w/2)."""
        made: Tensor = self.conv2(self.conv1(x_bchw))
        return made


class ContextNet(nn.Module):
    """Features of a frame at 1/2, 1/4, 1/8 and 1/16, each warped by the flow at its size."""

    def __init__(self) -> None:
        super().__init__()
        for number, (before, after) in enumerate(
            pairwise((3, WIDTH, 2 * WIDTH, 4 * WIDTH, 8 * WIDTH)), start=1
        ):
            setattr(self, f"conv{number}", Stage(before, after))
        self.warp = WarpRegion(masked=False, border=True)

    def forward(self, image_bchw: Tensor, flow_b2hw: Tensor) -> list[Tensor]:
        """Return the four maps."""
        x, flow, warped = image_bchw, flow_b2hw, []
        for number in range(1, 5):
            x = getattr(self, f"conv{number}")(x)
            flow = resized(flow, 0.5) * 0.5
            warped.append(self.warp(x, flow))
        return warped


class Unet(nn.Module):
    """From the frames, what they became and their context to numbers between 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        c = WIDTH
        downs = ((17, 2 * c), (4 * c, 4 * c), (8 * c, 8 * c), (16 * c, 16 * c))
        ups = ((32 * c, 8 * c), (16 * c, 4 * c), (8 * c, 2 * c), (4 * c, c))
        for number, (inputs, outputs) in enumerate(downs):
            setattr(self, f"down{number}", Stage(inputs, outputs))
        for number, (inputs, outputs) in enumerate(ups):
            up = nn.Sequential(nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.PReLU(outputs))
            setattr(self, f"up{number}", up)
        self.conv = nn.Conv2d(c, 3, 3, 1, 1)

    def forward(
        self, seen_bchw: Tensor, context_0: Sequence[Tensor], context_1: Sequence[Tensor]
    ) -> Tensor:
        """Return (b, 3, h, w) for 17 channels: frames, warped frames, mask before the sigmoid, flow."""
        x, skips = seen_bchw, []
        for number in range(4):
            x = getattr(self, f"down{number}")(x)
            skips.append(x)
            x = torch.cat((x, context_0[number], context_1[number]), dim=1)
        for number in range(4):
            seen = x if number == 0 else torch.cat((x, skips[3 - number]), dim=1)
            x = getattr(self, f"up{number}")(seen)
        return torch.sigmoid(self.conv(x))
