"""XSeg: draws a face's mask, whatever covers it, as DeepFaceLab has it: a U-Net with filter response normalisation
(Singh and Krishnan, 2020), blurred pooling (Zhang, "Making Convolutional Networks Shift-Invariant Again", 2019) and two
dense layers at its bottom.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 256
WIDTH = 32
LEVELS = ((1, 2, 4), (2, 2, 3), (4, 2, 2), (8, 3, 2), (8, 3, 2), (8, 3, 2))
"""Channels in widths, convolutions and taps of the blur before the next level."""
UP_CHANNELS = (1, 2, 4, 4, 4, 4)
CODE = 512
FAINT = 0.1
"""Mask values below are 0."""


class Response(nn.Module):
    """Divide each channel by its root mean square, then scale and shift it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(channels)),
            nn.Parameter(torch.zeros(channels)),
        )
        self.eps = nn.Parameter(torch.full((1,), 1e-6))

    def forward(self, x_bchw: Tensor) -> Tensor:
        # Squares of half numbers leave float16's range; the result keeps the input's dtype.
        power = x_bchw.float().square().mean(dim=(2, 3), keepdim=True)
        scale = torch.rsqrt(power + self.eps.abs()) * self.weight[:, None, None]
        return x_bchw * scale.to(x_bchw.dtype) + self.bias[:, None, None].to(x_bchw.dtype)


class Threshold(nn.Module):
    """The rectifier with a learnt threshold."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.tau = nn.Parameter(torch.zeros(channels))

    def forward(self, x_bchw: Tensor) -> Tensor:
        return torch.maximum(x_bchw, self.tau[:, None, None].to(x_bchw.dtype))


class Block(nn.Module):
    """A convolution, or one that doubles the sides, its response normalised and cut off below."""

    def __init__(self, before: int, after: int, doubles: bool = False) -> None:
        super().__init__()
        self.doubles = doubles
        self.conv: nn.Module = (
            nn.ConvTranspose2d(before, after, 3, 2)
            if doubles
            else nn.Conv2d(before, after, 3, 1, 1)
        )
        self.frn, self.tlu = Response(after), Threshold(after)

    def forward(self, x_bchw: Tensor) -> Tensor:
        y = self.conv(x_bchw)
        y = y[..., :-1, :-1] if self.doubles else y
        result: Tensor = self.tlu(self.frn(y))
        return result


class XSeg(nn.Module):
    """Faces (b 3 s s), B, G, R in [0, 1], to logits of the mask (b 1 s s). DeepFaceLab's has 256 pixels and width 32.

    During pretraining (`pretrains`) the skip connections are zero.
    """

    def __init__(self, side: int = SIDE, width: int = WIDTH) -> None:
        super().__init__()
        before = 3
        for level, (factor, count, _) in enumerate(LEVELS):
            for number in range(1, count + 1):
                self.add_module(f"conv{level}{number}", Block(before, factor * width))
                before = factor * width
        self.flat = before * (side >> len(LEVELS)) ** 2
        self.dense1, self.dense2 = nn.Linear(self.flat, CODE), nn.Linear(CODE, self.flat)
        for level in reversed(range(len(LEVELS))):
            factor, count, _ = LEVELS[level]
            self.add_module(f"up{level}", Block(before, UP_CHANNELS[level] * width, doubles=True))
            before = (UP_CHANNELS[level] + factor) * width
            for number in range(count, 0, -1):
                # The last convolution of a level has the width that the level above it goes up from.
                self.add_module(f"uconv{level}{number}", Block(before, factor * width))
                before = factor * width
        self.out_conv = nn.Conv2d(before, 1, 3, 1, 1)

    def forward(self, face_b3hw: Tensor, pretrains: bool = False) -> Tensor:
        x, passed = face_b3hw, []
        for level, (_, count, taps) in enumerate(LEVELS):
            for number in range(1, count + 1):
                x = self.get_submodule(f"conv{level}{number}")(x)
            passed.append(x)
            x = blur_pool(x, taps)
        shape = x.shape
        x = self.dense2(self.dense1(x.flatten(1))).view(shape)
        for level in reversed(range(len(LEVELS))):
            beside = torch.zeros_like(passed[level]) if pretrains else passed[level]
            x = torch.cat((self.get_submodule(f"up{level}")(x), beside), dim=1)
            for number in range(LEVELS[level][1], 0, -1):
                x = self.get_submodule(f"uconv{level}{number}")(x)
        logits: Tensor = self.out_conv(x)
        return logits


def blur_pool(x_bchw: Tensor, taps: int) -> Tensor:
    """Halve the sides after a blur by binomial weights, with zeros beyond the border."""
    line = {2: [1.0, 1.0], 3: [1.0, 2.0, 1.0], 4: [1.0, 3.0, 3.0, 1.0]}[taps]
    kernel = x_bchw.new_tensor(line)
    kernel = kernel[:, None] * kernel
    before, after = (taps - 1) // 2, taps // 2
    padded = F.pad(x_bchw, (before, after, before, after))
    channels = x_bchw.shape[1]
    return F.conv2d(
        padded, (kernel / kernel.sum()).expand(channels, 1, taps, taps), stride=2, groups=channels
    )


@torch.no_grad()
def draw_mask(
    network: nn.Module, face_hwc: np.ndarray[Any, Any], device: torch.device | str = "cpu"
) -> Any:
    """Return the mask (256, 256) of a face (256, 256, 3), B, G, R."""
    face = (
        torch.from_numpy(np.ascontiguousarray(face_hwc, np.float32))
        .permute(2, 0, 1)[None]
        .to(device)
    )
    mask = torch.sigmoid(network(face))[0, 0].float().cpu().numpy()
    return np.where(mask < FAINT, np.float32(0), mask)
