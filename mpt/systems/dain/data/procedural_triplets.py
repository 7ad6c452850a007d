"""Drawn triplets: a moving textured background under moving textured discs and boxes, with the true frame between.

Motion is linear, so the frame at any time, both flows and which surface is in front are known exactly. The pictures
depend on `data_seed` and the split alone, not on the run's seed, so that seeds can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from mpt.config.options import DatasetOptions
from mpt.data.pictures.seeds import mix
from mpt.errors import ConfigError
from mpt.systems.dain.data.shared.triplets import Changes, Triplet, Triplets

MARGIN = 16
"""Pixels of texture beyond each edge of the picture, so that it can move."""
OCTAVES = ((6, 1.0), (12, 0.6), (24, 0.4))
"""Of a texture: cells along a side, and amplitude."""
CHUNK = 64


class Settings(DatasetOptions):
    """How many triplets, and how far things move."""

    count: int = Field(512, ge=1)
    """Training triplets."""
    test_count: int = Field(64, ge=1)
    """Test triplets."""
    shapes: int = Field(2, ge=0, le=8)
    """Moving surfaces in front of the background, each nearer than the one before."""
    max_motion: float = Field(7.0, gt=0, le=12)
    """Largest motion between first and last frame along each axis, in pixels; the background's is 0.4 of it."""
    times: list[float] = Field([0.5])
    """Where the middle frame stands; a training sample has one of them, drawn anew each epoch."""
    flip: bool = True
    """Flip training samples at random, horizontally and vertically, each with probability 0.5."""
    temporal_swap: bool = True
    """Swap first and last frame of training samples at random, with probability 0.5."""
    depth_order: bool = False
    """Add the field `order` (2, height, width): the number of the surface that is seen in the first and in the last
    frame, 0 for the background, larger ones nearer."""
    data_seed: int = 0
    """Seed of the drawn data; independent of the run's `seed`."""
    channels: Literal[3] = 3


@dataclass
class Scene:
    """Surfaces of a number of samples, the background first. `velocity` is over the whole interval."""

    texture: Tensor  # (layers, b, 3, side, side)
    velocity: Tensor  # (layers, b, 2)
    centre: Tensor  # (layers, b, 2)
    radius: Tensor  # (layers, b)
    is_box: Tensor  # (layers, b)


class Rendered(NamedTuple):
    """A frame (b, 3, h, w), and of the surface in front its velocity (b, 2, h, w) and number (b, h, w), uint8."""

    image: Tensor
    motion: Tensor
    surface: Tensor


class Drawn(NamedTuple):
    """Frames (b, 3, h, w) uint8 by time, flows (b, 4, h, w) float32, and the surfaces in front (b, 2, h, w) uint8."""

    frames: dict[float, Tensor]
    flows: Tensor
    order: Tensor


def draw_texture(count: int, side: int, numbers: torch.Generator) -> Tensor:
    """Return smooth coloured noise (count, 3, side, side) in [0, 1]."""
    total = torch.zeros(count, 3, side, side)
    for cells, amplitude in OCTAVES:
        noise = torch.rand(count, 3, cells, cells, generator=numbers)
        total += amplitude * F.interpolate(
            noise, size=(side, side), mode="bicubic", align_corners=True
        )
    low, high = total.amin((2, 3), keepdim=True), total.amax((2, 3), keepdim=True)
    return (total - low) / (high - low)


def draw_scene(count: int, size: int, shapes: int, max_motion: float, seed: int) -> Scene:
    """Return the surfaces of `count` samples."""
    numbers = torch.Generator().manual_seed(seed)
    layers = shapes + 1
    texture = torch.stack([draw_texture(count, size + 2 * MARGIN, numbers) for _ in range(layers)])
    velocity = (torch.rand(layers, count, 2, generator=numbers) * 2 - 1) * max_motion
    velocity[0] *= 0.4
    centre = torch.rand(layers, count, 2, generator=numbers) * size * 0.7 + size * 0.15
    radius = torch.rand(layers, count, generator=numbers) * size * 0.12 + size * 0.1
    return Scene(
        texture, velocity, centre, radius, torch.rand(layers, count, generator=numbers) < 0.5
    )


def render(scene: Scene, size: int, time: float) -> Rendered:
    """Return the frame at a time, and which surface is in front."""
    axis = torch.arange(size, dtype=torch.float32)
    x, y = axis[None, None, :], axis[None, :, None]
    image = front = None
    number = torch.zeros(scene.texture.shape[1], size, size, dtype=torch.uint8)
    surfaces = zip(
        scene.texture, scene.velocity, scene.centre, scene.radius, scene.is_box, strict=True
    )
    for layer, (texture, velocity, centre, radius, is_box) in enumerate(surfaces):
        moved = velocity * (time - 0.5)
        dx, dy = moved[:, 0, None, None], moved[:, 1, None, None]
        span = size + 2 * MARGIN - 1
        place_x, place_y = x - dx + MARGIN, y - dy + MARGIN
        shape = (len(velocity), size, size)
        grid = torch.stack((place_x.expand(shape), place_y.expand(shape)), dim=-1) / span * 2 - 1
        surface = F.grid_sample(texture, grid, mode="bilinear", align_corners=True)
        motion = velocity[:, :, None, None].expand(-1, -1, size, size)
        if image is None or front is None:
            image, front = surface, motion
            continue
        across, down = x - dx - centre[:, 0, None, None], y - dy - centre[:, 1, None, None]
        box, disc = (
            torch.maximum(across.abs(), down.abs()),
            (across.square() + down.square()).sqrt(),
        )
        outside = torch.where(is_box[:, None, None], box, disc) - radius[:, None, None]
        cover = (0.5 - outside).clamp(0, 1)[:, None]  # an edge one pixel wide
        image = image * (1 - cover) + surface * cover
        front = torch.where(cover > 0.5, motion, front)
        number = number.masked_fill(cover[:, 0] > 0.5, layer)
    assert image is not None
    assert front is not None
    return Rendered(image, front, number)


class DrawnTriplets:
    """The source: everything is drawn once, when first asked for."""

    dtype = torch.uint8
    has_flow = True

    def __init__(self, settings: Settings, size: int, is_test: bool) -> None:
        self.settings, self.side, self.is_test = settings, size, is_test
        self.has_order = settings.depth_order
        self.count = settings.test_count if is_test else settings.count
        self.names = [f"scene {number}" for number in range(self.count)]

    def __len__(self) -> int:
        return self.count

    def largest(self) -> tuple[int, int]:
        """Return the one size there is."""
        return self.side, self.side

    @cached_property
    def drawn(self) -> Drawn:
        """Everything that is drawn."""
        frames: dict[float, list[Tensor]] = {time: [] for time in (0.0, 1.0, *self.settings.times)}
        flows, order = [], []
        for start in range(0, self.count, CHUNK):
            many = min(CHUNK, self.count - start)
            seed = mix(self.settings.data_seed, int(self.is_test), start)
            scene = draw_scene(
                many, self.side, self.settings.shapes, self.settings.max_motion, seed
            )
            ends = {}
            for time, images in frames.items():
                rendered = render(scene, self.side, time)
                images.append(rendered.image.clamp(0, 1).mul(255).round().byte())
                ends[time] = rendered
            flows.append(torch.cat((ends[0.0].motion, -ends[1.0].motion), dim=1))
            order.append(torch.stack((ends[0.0].surface, ends[1.0].surface), dim=1))
        return Drawn(
            {time: torch.cat(images) for time, images in frames.items()},
            torch.cat(flows),
            torch.cat(order),
        )

    def read(self, index: int, draw: int) -> Triplet:
        """Return one triplet at a drawn time."""
        frames, flows, order = self.drawn
        time = self.settings.times[draw % len(self.settings.times)]
        surfaces = order[index] if self.has_order else None
        return Triplet(
            frames[0.0][index],
            frames[time][index],
            frames[1.0][index],
            time,
            flows[index],
            surfaces,
        )


def build(settings: Settings, split: str, seed: int) -> Triplets:
    """Draw the triplets of one split."""
    if settings.augment:
        raise ConfigError(
            "dataset.augment: the fields of a triplet change together, by flip and temporal_swap"
        )
    outside = [time for time in settings.times if not 0 < time < 1]
    if outside or not settings.times:
        raise ConfigError(
            f"dataset.times: found {settings.times}; each is between 0 and 1, and there is at least one"
        )
    is_test = split == "test"
    source = DrawnTriplets(settings, settings.image_size or 64, is_test)
    changes = Changes() if is_test else Changes(None, settings.flip, settings.temporal_swap)
    return Triplets(source, changes, seed, train=not is_test)
