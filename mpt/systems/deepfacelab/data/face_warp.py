"""Bend faces out of shape, a batch at a time: the network gets the bent face and has to draw the unbent one.

One affine map (rotation, scale, shift, flip) moves face and target alike; on top of it the input alone is displaced by
a grid of jittered control points. Both maps are composed into one sampling grid, so a face is interpolated once
(DeepFaceLab's inputs are twice), cubically as OpenCV does it; masks linearly. The numbers are DeepFaceLab's: 10
degrees, scale U(1/1.15, 1.15), shift 5 %, cells of a half, a quarter or an eighth of the side, inner points moved by a
normal truncated at 2.5 deviations, at most .24 of a cell.

What a sample's numbers are depends on (seed, epoch, index) alone: they are read from a counter-based generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ROTATION = math.radians(10)
SCALE = 1.15
SHIFT = 0.05
JITTER = 0.24
TRUNCATION = 2.5
NODES = 9
"""Control points along a side of the finest grid; coarser grids are interpolated onto it, which is exact."""
NUMBERS = 6 + 2 * (NODES - 2) ** 2


@dataclass(frozen=True)
class Warps:
    """The draws of a batch. `affine` (b 2 3) maps output to input pixels; `offsets` (b 2 9 9) are in sides."""

    affine: Tensor
    offsets: Tensor
    flipped: Tensor


def draw_numbers(seed: int, stream: int, epoch: int, indices: Sequence[int]) -> Tensor:
    """Return `NUMBERS` uniform numbers in [0, 1) for each sample, float64; streams are independent of each other."""
    rows = []
    for index in indices:
        generator = np.random.Philox(key=[seed % 2**64, epoch % 2**64], counter=[0, 0, index % 2**64, stream])
        rows.append(np.random.Generator(generator).random(NUMBERS))
    return torch.from_numpy(np.stack(rows))


def draw_warps(numbers: Tensor, size: int, transform: bool, flip_chance: float) -> Warps:
    """Turn uniform numbers (b, `NUMBERS`) into maps of images with sides of `size` pixels."""
    rotation = (numbers[:, 0] * 2 - 1) * ROTATION
    scale = 1 / SCALE + numbers[:, 1] * (SCALE - 1 / SCALE)
    shift = (numbers[:, 2:4] * 2 - 1) * SHIFT * size
    if not transform:
        rotation, scale, shift = torch.zeros_like(rotation), torch.ones_like(scale), torch.zeros_like(shift)
    # Output pixel p comes from input pixel R^-1 (p - centre - shift) / scale + centre.
    cosine, sine = rotation.cos() / scale, rotation.sin() / scale
    matrix = torch.stack((torch.stack((cosine, sine), 1), torch.stack((-sine, cosine), 1)), 1)
    centre = (size - 1) / 2
    start = centre - (matrix @ (shift + centre).unsqueeze(2)).squeeze(2)
    affine = torch.cat((matrix, start.unsqueeze(2)), dim=2).float()
    return Warps(affine, _offsets(numbers), numbers[:, 4] < flip_chance)


def _offsets(numbers: Tensor) -> Tensor:
    inner = NODES - 2
    share = math.erf(TRUNCATION / math.sqrt(2))
    normal = torch.erfinv((numbers[:, 6:] * 2 - 1) * share) * math.sqrt(2) / TRUNCATION
    normal = normal.view(-1, 2, inner, inner).float()
    fineness = (numbers[:, 5] * 3).long()
    offsets = torch.zeros(len(numbers), 2, NODES, NODES)
    for choice in range(3):
        cells = 2 ** (choice + 1)
        chosen = fineness == choice
        nodes = F.pad(normal[chosen][:, :, : cells - 1, : cells - 1] * (JITTER / cells), (1, 1, 1, 1))
        offsets[chosen] = F.interpolate(nodes, (NODES, NODES), mode="bilinear", align_corners=True)
    return offsets


def warp(images_b3hw: Tensor, masks_bchw: Tensor, warps: Warps, bend: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bent images, the images that were only moved, and the moved masks. Images are cut to [0, 1].

    Beyond the border an image repeats its edge and a mask is zero.
    """
    size = images_b3hw.shape[-1]
    line = torch.arange(size, dtype=torch.float32)
    y, x = torch.meshgrid(line, line, indexing="ij")
    x_bhw = torch.where(warps.flipped[:, None, None], size - 1 - x, x)
    affine = warps.affine[:, :, :, None, None]
    moved = affine[:, :, 0] * x_bhw[:, None] + affine[:, :, 1] * y + affine[:, :, 2]
    moved_grid = _normalized(moved, size)
    target = sample(images_b3hw, moved_grid)
    masks = F.grid_sample(masks_bchw, moved_grid, padding_mode="zeros", align_corners=False)
    if not bend:
        return target, target, masks
    moved = moved.clamp(0, size - 1)
    nodes_grid = (moved * (2 / size) - 1).permute(0, 2, 3, 1)
    offsets = F.grid_sample(warps.offsets, nodes_grid, padding_mode="border", align_corners=True)
    bent_grid = _normalized(moved + offsets * size, size)
    return sample(images_b3hw, bent_grid), target, masks


def sample(images: Tensor, grid: Tensor) -> Tensor:
    """Return images at a grid's places, cubically."""
    return F.grid_sample(images, grid, mode="bicubic", padding_mode="border", align_corners=False).clamp_(0, 1)


def shift_hues(images_b3hw: Tensor, numbers: Tensor, power: float) -> Tensor:
    """Return RGB images whose hue, saturation and value are each moved by a random amount, as far as `power` allows.

    `numbers` (b, 3) are uniform in [0, 1). Hue goes by whole degrees up to 180 times the power, the others up to half.
    """
    reach = max(1, int(360 * power * 0.5))
    degrees = torch.floor(numbers[:, 0] * (2 * reach + 1)) - reach
    hue, saturation, value = to_hsv(images_b3hw)
    turned = (hue + degrees.float()[:, None, None]) % 360
    saturation, value = (
        (part + (numbers[:, index].float()[:, None, None] - 0.5) * power).clamp(0, 1)
        for index, part in ((1, saturation), (2, value))
    )
    return from_hsv(turned, saturation, value)


def to_hsv(images_b3hw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hue in degrees, saturation and value, each (b h w)."""
    value, which = images_b3hw.max(dim=1)
    spread = value - images_b3hw.amin(dim=1)
    red, green, blue = images_b3hw.unbind(1)
    safe = spread.clamp(min=1e-12)
    sixths = torch.stack(((green - blue) / safe, (blue - red) / safe + 2, (red - green) / safe + 4))
    hue = sixths.gather(0, which[None])[0] * 60 % 360
    return hue, spread / value.clamp(min=1e-12), value


def from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Return RGB images (b 3 h w)."""
    channels = []
    for start in (5, 3, 1):
        place = (hue / 60 + start) % 6
        channels.append(value - value * saturation * torch.minimum(place, 4 - place).clamp(0, 1))
    return torch.stack(channels, dim=1)


def _normalized(pixels_b2hw: Tensor, size: int) -> Tensor:
    return ((pixels_b2hw * 2 + 1) / size - 1).permute(0, 2, 3, 1)
