"""Where one scene ends and another begins: between such frames nothing is to be interpolated.

Two frames are of one scene if some shift makes their thumbnails, 48 x 48 and grey, alike: over all shifts up to half a
side, 2 cov / (var + var) of what overlaps. A pan shifts a picture, a cut leaves no shift that fits; and as the measure
is relative to contrast, a dark cut is a cut. Differences of brightness alone do not count.

Misses and false alarms on made cuts, pans, zooms and passing objects: docs/benchmarks/scene_cuts.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 48
THRESHOLD = 0.72
"""Below this similarity two frames are of different scenes."""
MOST_SHIFT = 0.5
"""Share of the picture that a shift may move out of sight."""
NOISE = 1e-6
"""Variance below which a thumbnail is flat: a quarter of a grey level of 8 bits, squared."""
GREY = (0.299, 0.587, 0.114)


def thumbnail(image_chw: Tensor) -> Tensor:
    """Return a frame, uint8, int32 up to 65535, or floats in [0, 1], as (48, 48) grey floats."""
    most = {torch.uint8: 255, torch.int32: 65535}.get(image_chw.dtype, 1)
    image = image_chw.float() / most
    grey = (image * image.new_tensor(GREY)[:, None, None]).sum(0, keepdim=True)
    return F.interpolate(grey[None], size=(SIDE, SIDE), mode="area")[0, 0]


def is_cut(one: Tensor, other: Tensor, threshold: float = THRESHOLD) -> bool:
    """Do two thumbnails belong to different scenes?"""
    return threshold > 0 and similarity(one, other) < threshold


def similarity(one_hw: Tensor, other_hw: Tensor) -> float:
    """Return the largest likeness over all shifts, at most 1. Two flat pictures are alike."""
    one, other = (Overlaps(picture) for picture in (one_hw, other_hw))
    inside = one.sums(one.ones, other.ones).round()
    mean_one, mean_other = (one.sums(*pair) / inside.clamp(min=1) for pair in one.pairs(other))
    count = inside.clamp(min=1)
    covariance = one.sums(one.values, other.values) / count - mean_one * mean_other
    spread_one = one.sums(one.squares, other.ones) / count - mean_one.square()
    spread_other = one.sums(one.ones, other.squares) / count - mean_other.square()
    likeness = (covariance + NOISE) / ((spread_one + spread_other) / 2 + NOISE)
    reaches = inside >= (1 - MOST_SHIFT) * one_hw.numel()
    return float(torch.where(reaches, likeness, -1).max())


class Overlaps:
    """The spectra of a picture, its squares and its extent, of which products give sums over every overlap at once."""

    def __init__(self, picture_hw: Tensor) -> None:
        self.size = tuple(2 * side for side in picture_hw.shape)
        self.values, self.squares, self.ones = (
            torch.fft.rfft2(part.double(), s=self.size)
            for part in (picture_hw, picture_hw.square(), torch.ones_like(picture_hw))
        )

    def pairs(self, other: Overlaps) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the factors whose products are sums over either picture."""
        return (self.values, other.ones), (self.ones, other.values)

    def sums(self, one: Tensor, other: Tensor) -> Tensor:
        """Return, for every shift, the sum over the overlap of one picture times the other, shifted."""
        summed: Tensor = torch.fft.irfft2(one.conj() * other, s=self.size)
        return summed
