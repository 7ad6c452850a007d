"""Discs, squares and triangles in random colours on shaded backgrounds, drawn by formula: RGB images in any number and
size without a file. For trying a colour model on a CPU; it says little about photographs.

The pictures depend on `data_seed` and the split alone, not on the run's seed, so that seeds can be compared.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from mpt.config.options import DatasetOptions
from mpt.data.pictures.in_memory import InMemory
from mpt.data.pictures.seeds import mix

KINDS = ("disc", "square", "triangle")
DRAWN_AT_LEAST = 32
CHUNK = 256


class Settings(DatasetOptions):
    size: int = Field(2000, ge=1)
    """Number of training images; there is a test image for every four."""
    data_seed: int = 0
    """Seed of the drawn data; independent of the run's `seed`."""


def draw_shapes(count: int, image_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images (count, 3, image_size, image_size), uint8, and labels (count,): the kind, 0 to 2."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(len(KINDS), (count,), generator=generator)
    numbers = torch.rand(count, 14, generator=generator)
    images = torch.empty(count, 3, image_size, image_size, dtype=torch.uint8)
    for start in range(0, count, CHUNK):
        stop = start + CHUNK
        images[start:stop] = (
            render(label[start:stop], numbers[start:stop], image_size).mul_(255).round_()
        )
    return images, label


def render(label: Tensor, numbers: Tensor, image_size: int) -> Tensor:
    """Return float images from kinds (b,) and 14 uniform numbers each (b, 14): colours, place, size, turn, shading."""
    axis = (torch.arange(image_size) + 0.5) / image_size
    columns = numbers[:, :, None, None]
    radius = 0.15 + 0.15 * columns[:, 11]
    x = axis[None, None, :] - (0.3 + 0.4 * columns[:, 9])
    y = axis[None, :, None] - (0.3 + 0.4 * columns[:, 10])
    turn = 2 * math.pi * columns[:, 12]
    across, along = x * turn.cos() + y * turn.sin(), y * turn.cos() - x * turn.sin()
    # Signed distances from the outline: negative inside.
    disc = (across.square() + along.square()).sqrt() - radius
    square = torch.maximum(across.abs(), along.abs()) - 0.85 * radius
    slope = math.sqrt(3) / 2
    edges = torch.stack([along, slope * across - 0.5 * along, -slope * across - 0.5 * along])
    triangle = edges.amax(0) - 0.65 * radius
    distance = torch.stack([disc, square, triangle], dim=1)[torch.arange(len(label)), label]
    cover = (0.5 - distance * image_size).clamp(0, 1)[:, None]  # an edge one pixel wide
    shade_turn = 2 * math.pi * columns[:, 13]
    shade = (0.5 + 0.5 * (x * shade_turn.cos() + y * shade_turn.sin())).clamp(0, 1)[:, None]
    one, other, shape = (numbers[:, first : first + 3, None, None] for first in (0, 3, 6))
    background = 0.6 * (one * (1 - shade) + other * shade)
    return background * (1 - cover) + (0.4 + 0.6 * shape) * cover


def build(settings: Settings, split: str, seed: int) -> InMemory:
    """Return the shapes of one split."""
    is_test = split == "test"
    image_size = settings.image_size or DRAWN_AT_LEAST
    images, labels = draw_shapes(
        -(-settings.size // 4) if is_test else settings.size,
        max(image_size, DRAWN_AT_LEAST),
        mix(settings.data_seed, int(is_test)),
    )
    return InMemory(
        images,
        labels,
        KINDS,
        image_size=image_size,
        channels=settings.channels,
        augment=() if is_test else settings.augment,
        seed=seed,
    )
