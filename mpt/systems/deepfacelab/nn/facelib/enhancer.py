"""FaceEnhancer: faces at four times their resolution, by the network that DeepFaceLab's super-resolution uses.

A U-Net of five levels. Its picture at each of three resolutions is the one before it, enlarged, plus a correction. Two
numbers steer it, which are constants in DeepFaceLab. Pictures are cut into patches of 192 pixels that overlap by half
and are laid together by weights that are 0 at a patch's border, so the outermost pixels of a whole picture are black
unless it was padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FACTOR = 4
PATCH = 192
SLOPE = 0.1
STRENGTH, OTHER = 0.2, 1.0
"""The two numbers that steer the network."""
WIDTHS = (64, 112, 192, 336, 512)
UP_WIDTHS = (96, 160, 288, 512, 512)


class Enhancer(nn.Module):
    """Faces (b 3 192 192), B, G, R, to faces (b 3 768 768)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = convolution(3, WIDTHS[0])
        self.dense1, self.dense2 = (nn.Linear(1, WIDTHS[0], bias=False) for _ in range(2))
        before = WIDTHS[0]
        for level, width in enumerate(WIDTHS):
            self.add_pair(f"e{level}", before, width)
            before = width
        for number in range(4):
            self.add_module(f"center_conv{number}", convolution(before, before))
        for level in reversed(range(len(WIDTHS))):
            self.add_pair(f"d{level}", before + WIDTHS[level], UP_WIDTHS[level])
            before = UP_WIDTHS[level]
        for name, width, enlarged in (
            ("1x", before, 0),
            ("2x", before, before),
            ("4x", 72, before),
        ):
            if enlarged:
                self.add_pair(f"dec{name}", enlarged, width)
            self.add_module(f"out{name}_conv0", convolution(width, width // 2))
            self.add_module(f"out{name}_conv1", convolution(width // 2, 3))

    def add_pair(self, name: str, before: int, after: int) -> None:
        """Add two convolutions."""
        self.add_module(f"{name}_conv0", convolution(before, after))
        self.add_module(f"{name}_conv1", convolution(after, after))

    def pair(self, name: str, x: Tensor) -> Tensor:
        """Apply two convolutions, each with its rectifier."""
        for number in range(2):
            x = F.leaky_relu(self.get_submodule(f"{name}_conv{number}")(x), SLOPE)
        return x

    def correction(self, name: str, x: Tensor) -> Tensor:
        """Return the correction of the picture at one resolution."""
        x = F.leaky_relu(self.get_submodule(f"out{name}_conv0")(x), SLOPE)
        return torch.tanh(self.get_submodule(f"out{name}_conv1")(x))

    def forward(self, face_b3hw: Tensor) -> Tensor:
        ones = face_b3hw.new_ones(1, 1)
        steered = (self.dense1(ones * STRENGTH) + self.dense2(ones * OTHER))[:, :, None, None]
        x, passed = F.leaky_relu(self.conv1(face_b3hw) + steered, SLOPE), []
        for level in range(len(WIDTHS)):
            x = self.pair(f"e{level}", x)
            passed.append(x)
            x = F.avg_pool2d(x, 2)
        for number in range(4):
            x = F.leaky_relu(self.get_submodule(f"center_conv{number}")(x), SLOPE)
        for level in reversed(range(len(WIDTHS))):
            x = self.pair(f"d{level}", torch.cat((double(x), passed[level]), dim=1))
        picture = face_b3hw + self.correction("1x", x)
        for name in ("2x", "4x"):
            x = double(self.pair(f"dec{name}", x))
            picture = double(picture) + self.correction(name, x)
        return picture


def convolution(before: int, after: int) -> nn.Conv2d:
    """Return a 3 x 3 convolution that keeps the sides."""
    return nn.Conv2d(before, after, 3, 1, 1)


def double(x_bchw: Tensor) -> Tensor:
    """Double the sides: a pixel, then the mean of it and the next, as TensorFlow 1 resizes bilinearly."""
    for dim in (2, 3):
        following = torch.cat(
            (x_bchw.narrow(dim, 1, x_bchw.shape[dim] - 1), x_bchw.narrow(dim, -1, 1)), dim
        )
        x_bchw = torch.stack((x_bchw, (x_bchw + following) / 2), dim + 1).flatten(dim, dim + 1)
    return x_bchw


def starts(length: int) -> Iterator[int]:
    """Yield the starts of the patches along a side."""
    last, start = length - PATCH, 0
    while start < last:
        yield start
        start += PATCH // 2
    yield last


@torch.no_grad()
def enlarge(
    network: nn.Module, face_hwc: np.ndarray[Any, Any], device: torch.device | str = "cpu"
) -> Any:
    """Return a face (h, w, 3), B, G, R in [0, 1], with four times its sides. Values may leave [0, 1]."""
    height, width = face_hwc.shape[:2]
    missing = [max(0, PATCH - side) for side in (height, width)]
    padded = np.pad(
        face_hwc, [*((less // 2, less - less // 2) for less in missing), (0, 0)]
    ).astype(np.float32)
    whole = torch.from_numpy(np.ascontiguousarray(padded.transpose(2, 0, 1)))[None].to(device)
    rise = torch.linspace(0, 1, PATCH * FACTOR // 2, dtype=torch.float64, device=device)
    line = torch.cat((rise, rise.flip(0)))
    weights = (line[:, None] * line).float()
    total = whole.new_zeros(3, *(side * FACTOR for side in whole.shape[2:]))
    counted = torch.zeros_like(total[:1])
    for top in starts(whole.shape[2]):
        for left in starts(whole.shape[3]):
            patch = network(whole[:, :, top : top + PATCH, left : left + PATCH])[0].float()
            place = tuple(slice(start * FACTOR, (start + PATCH) * FACTOR) for start in (top, left))
            total[:, place[0], place[1]] += patch * weights
            counted[:, place[0], place[1]] += weights
    result = (total / torch.where(counted > 0, counted, 1.0)).permute(1, 2, 0).cpu().numpy()
    top, left = (less // 2 * FACTOR for less in missing)
    return result[top : top + height * FACTOR, left : left + width * FACTOR]
