"""Bend faces out of shape, a batch at a time: the network gets the bent face and has to draw the unbent one.

First the input alone is displaced by a grid of jittered control points; then one affine map (rotation, scale, shift,
flip) moves input and target alike. Both interpolate cubically, masks linearly, as OpenCV does it. The numbers and
their odd sides are DeepFaceLab's: 10 degrees, scale U(1/1.15, 1.15), of a Quick96 U(1/1.05, 1.05), shift 5 %; cells of
a half, a quarter or an eighth of the side, inner points moved by 0.24 of a cell times the sum of two jitters, each a
normal cut off at 2.5 deviations and divided by them, the second transposed. The displacement in y is that in x,
transposed. The map counts from pixels' edges and is read as if from their centres, which moves every input by half a
pixel against its target.

A sample's numbers depend on (seed, epoch, index) alone: they are read from a counter-based generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

JITTER = 0.24
TRUNCATION = 2.5
NODES = 9
"""Control points along a side of the finest grid; coarser grids are interpolated onto it, which is exact."""
NUMBERS = 6 + 2 * (NODES - 2) ** 2


@dataclass(frozen=True)
class Reach:
    """How far faces are turned (radians, either way), scaled (from the inverse on) and shifted (shares of a side)."""

    rotation: float
    scale: float
    shift: float


FACE = Reach(math.radians(10), 1.15, 0.05)
"""The random movements of SAEHD's faces."""


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
        generator = np.random.Philox(
            key=[seed % 2**64, epoch % 2**64], counter=[0, 0, index % 2**64, stream]
        )
        rows.append(np.random.Generator(generator).random(NUMBERS))
    return torch.from_numpy(np.stack(rows))


def draw_warps(
    numbers: Tensor, size: int, transform: bool, flip_chance: float, reach: Reach = FACE
) -> Warps:
    """Turn uniform numbers (b, `NUMBERS`) into maps of images with sides of `size` pixels."""
    rotation = (numbers[:, 0] * 2 - 1) * reach.rotation
    scale = 1 / reach.scale + numbers[:, 1] * (reach.scale - 1 / reach.scale)
    shift = (numbers[:, 2:4] * 2 - 1) * reach.shift * size
    if not transform:
        rotation, scale, shift = (
            torch.zeros_like(rotation),
            torch.ones_like(scale),
            torch.zeros_like(shift),
        )
    # OpenCV's rotation about the middle pixel: input p goes to scale R (p - centre) + centre + shift. Here its inverse.
    cosine, sine = rotation.cos() / scale, rotation.sin() / scale
    matrix = torch.stack((torch.stack((cosine, -sine), 1), torch.stack((sine, cosine), 1)), 1)
    centre = float(size // 2)
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
        offsets[chosen] = node_offsets(normal[chosen][:, :, : cells - 1, : cells - 1])
    return offsets


def node_offsets(jitters_b2nn: Tensor) -> Tensor:
    """Return the displacement in x and y, in sides, of `NODES` x `NODES` points from the jitters of inner points."""
    cells = jitters_b2nn.shape[-1] + 1
    moved_x = (jitters_b2nn[:, 0] + jitters_b2nn[:, 1].mT) * (JITTER / cells)
    nodes = F.pad(torch.stack((moved_x, moved_x.mT), dim=1), (1, 1, 1, 1))
    return F.interpolate(nodes, (NODES, NODES), mode="bilinear", align_corners=True)


def warp(
    images_b3hw: Tensor,
    masks_bchw: Tensor,
    warps: Warps,
    bend: bool,
    inputs_b3hw: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bent images, the images that were only moved, and the moved masks. Images are cut to [0, 1].

    Beyond the border an image repeats its edge and a mask is zero; pixels bent in from beyond it are black. If
    `inputs_b3hw` are given, they are bent (or only moved) in the images' place.
    """
    inputs = images_b3hw if inputs_b3hw is None else inputs_b3hw
    size = images_b3hw.shape[-1]
    line = torch.arange(size, dtype=torch.float32)
    y, x = torch.meshgrid(line, line, indexing="ij")
    x_bhw = torch.where(warps.flipped[:, None, None], size - 1 - x, x)
    affine = warps.affine[:, :, :, None, None]
    moved = affine[:, :, 0] * x_bhw[:, None] + affine[:, :, 1] * y + affine[:, :, 2]
    moved_grid = _normalized(moved, size)
    target = sample(images_b3hw, moved_grid, "border").clamp_(0, 1)
    masks = F.grid_sample(masks_bchw, moved_grid, padding_mode="zeros", align_corners=False)
    if not bend:
        moved_inputs = (
            target if inputs_b3hw is None else sample(inputs, moved_grid, "border").clamp_(0, 1)
        )
        return moved_inputs, target, masks
    bent = sample(inputs, _normalized(bend_map(warps.offsets, size), size), "zeros")
    return sample(bent, moved_grid, "border").clamp_(0, 1), target, masks


def bend_map(offsets_b2nn: Tensor, size: int) -> Tensor:
    """Return the source of each pixel of a bent image, (b 2 size size): x and y as indexes of pixels."""
    line = torch.arange(size, dtype=torch.float32, device=offsets_b2nn.device) + 0.5
    y, x = torch.meshgrid(line, line, indexing="ij")
    places = (torch.stack((x, y), -1) * (2 / size) - 1).expand(len(offsets_b2nn), -1, -1, -1)
    moved = F.grid_sample(offsets_b2nn, places, padding_mode="border", align_corners=True)
    return torch.stack((x, y)) + moved * size


def sample(images: Tensor, grid: Tensor, beyond: str) -> Tensor:
    """Return images at a grid's places, cubically."""
    return F.grid_sample(images, grid, mode="bicubic", padding_mode=beyond, align_corners=False)


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
