"""FAN: finds 68 landmarks of a face (Bulat and Tzimiropoulos, "How far are we from solving the 2D & 3D Face Alignment
problem?", 2017), as DeepFaceLab runs it: four stacked hourglasses that draw a heat map per landmark.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpt.systems.deepfacelab.data.faces.face_geometry import Points
from mpt.systems.deepfacelab.data.faces.opencv import opencv

Picture = np.ndarray[Any, np.dtype[Any]]
STACKS, DEPTH, LANDMARKS, SIDE = 4, 4, 68, 256
REFERENCE, SPREAD = 195.0, 200.0
"""A face whose box has sides that add up to twice the first is shown in a square of the second, at scale 1."""
AROUND = ((0, 0), (-1, -1), (1, -1), (1, 1), (-1, 1))


class Block(nn.Module):
    """Three convolutions whose outputs are put together, and the input added."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        widths = (before, after // 2, after // 4, after // 4)
        for number, (one, other) in enumerate(itertools.pairwise(widths), start=1):
            self.add_module(f"bn{number}", nn.BatchNorm2d(one))
            self.add_module(f"conv{number}", nn.Conv2d(one, other, 3, padding=1, bias=False))
        if before != after:
            self.down_bn1 = nn.BatchNorm2d(before)
            self.down_conv1 = nn.Conv2d(before, after, 1, bias=False)

    def forward(self, x_bchw: Tensor) -> Tensor:
        parts, part = [], x_bchw
        for number in (1, 2, 3):
            part = self.get_submodule(f"conv{number}")(
                F.relu(self.get_submodule(f"bn{number}")(part))
            )
            parts.append(part)
        if hasattr(self, "down_bn1"):
            x_bchw = self.down_conv1(F.relu(self.down_bn1(x_bchw)))
        return torch.cat(parts, dim=1) + x_bchw


class Hourglass(nn.Module):
    """Work at half the resolution, and at half of that."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.b1, self.b2, self.b3 = Block(256, 256), Block(256, 256), Block(256, 256)
        self.b2_plus = Hourglass(depth - 1) if depth > 1 else Block(256, 256)

    def forward(self, x_bchw: Tensor) -> Tensor:
        low = self.b3(self.b2_plus(self.b2(F.avg_pool2d(x_bchw, 2))))
        result: Tensor = self.b1(x_bchw) + F.interpolate(low, scale_factor=2.0, mode="nearest")
        return result


class FAN(nn.Module):
    """Faces (b 3 256 256), R, G, B in [0, 1], to heat maps (b 68 64 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64)
        self.conv2, self.conv3, self.conv4 = Block(64, 128), Block(128, 128), Block(128, 256)
        for stack in range(STACKS):
            self.add_module(f"m_{stack}", Hourglass(DEPTH))
            self.add_module(f"top_m_{stack}", Block(256, 256))
            self.add_module(f"conv_last_{stack}", nn.Conv2d(256, 256, 1))
            self.add_module(f"bn_end_{stack}", nn.BatchNorm2d(256))
            self.add_module(f"l_{stack}", nn.Conv2d(256, LANDMARKS, 1))
            if stack < STACKS - 1:
                self.add_module(f"bl_{stack}", nn.Conv2d(256, 256, 1))
                self.add_module(f"al_{stack}", nn.Conv2d(LANDMARKS, 256, 1))

    def forward(self, face_b3hw: Tensor) -> Tensor:
        part = self.get_submodule
        x = F.avg_pool2d(self.conv2(F.relu(self.bn1(self.conv1(face_b3hw)))), 2)
        x = self.conv4(self.conv3(x))
        for stack in range(STACKS):
            y = part(f"conv_last_{stack}")(part(f"top_m_{stack}")(part(f"m_{stack}")(x)))
            y = F.relu(part(f"bn_end_{stack}")(y))
            heat: Tensor = part(f"l_{stack}")(y)
            if stack < STACKS - 1:
                x = x + part(f"bl_{stack}")(y) + part(f"al_{stack}")(heat)
        return heat


def centre_and_scale(box: tuple[float, float, float, float]) -> tuple[Points, float]:
    """Return the middle of a face's box and how large it is."""
    left, top, right, bottom = box
    return np.array([(left + right) / 2, (top + bottom) / 2]), (
        right - left + bottom - top
    ) / REFERENCE


def to_picture(point: Points, centre: Points, scale: float, side: int) -> Points:
    """Map a point of the face's square with sides of `side` pixels to the picture."""
    return np.asarray(centre + (np.asarray(point, np.float64) / side - 0.5) * SPREAD * scale)


def crop(picture: Picture, centre: Points, scale: float) -> Picture:
    """Return the square around a face, (256, 256, 3); beyond the picture it is black."""
    cv2 = opencv()
    start, end = (
        to_picture(np.full(2, at), centre, scale, SIDE).astype(int) for at in (1.0, float(SIDE))
    )
    square = np.zeros((*(end - start)[::-1], 3), picture.dtype)
    limits = np.array(picture.shape[1::-1])
    first, last = np.maximum(start, 0), np.minimum(end, limits)
    if (last > first).all():
        into = tuple(slice(a, b) for a, b in zip((first - start)[::-1], (last - start)[::-1]))
        square[into] = picture[first[1] : last[1], first[0] : last[0]]
    return np.asarray(cv2.resize(square, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR))


def points_of(heat: Picture, centre: Points, scale: float) -> Points:
    """Return landmarks (68, 2) in the picture of heat maps (68, 64, 64): each map's highest place, and a quarter of a
    pixel towards its higher neighbour.
    """
    side = heat.shape[-1]
    places = heat.reshape(len(heat), -1).argmax(axis=1)
    points = np.stack((places % side, places // side), 1).astype(np.float64)
    for number, (x, y) in enumerate(points.astype(int)):
        if 0 < x < side - 1 and 0 < y < side - 1:
            across = heat[number, y, x + 1] - heat[number, y, x - 1]
            down = heat[number, y + 1, x] - heat[number, y - 1, x]
            points[number] += np.sign([across, down]) * 0.25
    return to_picture(points + 0.5, centre, scale, side)


def find_landmarks(
    draw: Callable[[Picture], Picture],
    picture: Picture,
    box: tuple[float, float, float, float],
    around: bool = False,
) -> Points:
    """Return a face's landmarks (68, 2) in a picture (h, w, 3), R, G, B, uint8.

    `draw` makes heat maps (b, 68, 64, 64) of faces (b, 256, 256, 3) in [0, 1]. `around`: the mean over five places.
    """
    centre, scale = centre_and_scale(box)
    centres = [centre + np.array(step) for step in (AROUND if around else AROUND[:1])]
    heats = draw(np.stack([crop(picture, one, scale) for one in centres]) / np.float32(255))
    return np.asarray(
        np.mean([points_of(heat, one, scale) for heat, one in zip(heats, centres)], axis=0)
    )
