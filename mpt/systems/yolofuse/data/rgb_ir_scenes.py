"""Drawn street scenes seen by a visible and an infrared camera at once, with boxes around the people in them.

A person is visible with probability 0.7 and warm with probability 0.7, at least one of the two; so neither camera shows
all of them. There are hot discs in the infrared picture and coloured blocks in the visible one that are no people. For
demonstrations and tests: nothing is claimed about photographs.

The pictures depend on `data_seed` and the split alone, not on the run's seed, so that seeds can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from mpt.data.pictures.seeds import mix
from mpt.seams import Batch, DataSpec
from mpt.systems.yolofuse.data.shared.detection_labels import Rows
from mpt.systems.yolofuse.data.shared.given_files import read_sample
from mpt.systems.yolofuse.data.shared.scene_augmentation import Scene
from mpt.systems.yolofuse.data.shared.scene_dataset import (
    SIDES,
    Layout,
    SceneDataset,
    changes_of,
    check_common,
    most_boxes,
)
from mpt.systems.yolofuse.data.shared.scene_settings import SceneOptions

MOST_PEOPLE = 3
CLASSES = ("person",)
NAMES = {"rgb_ir_scenes": {"mosaic": 0.0, "brightness": 0.0, "translate": 0.0, "scale": 0.0}}


class Settings(SceneOptions):
    count: int = Field(300, ge=1)
    """Scenes to train on."""
    test_count: int = Field(300, ge=1)
    """Scenes to test on; with 100, mAP swings by 0.1 from set to set."""
    data_seed: int = 0
    """Seed of the drawn data; independent of the run's `seed`."""
    visible: float = Field(0.7, ge=0, le=1)
    """Probability that the visible camera shows a person."""
    warm: float = Field(0.7, ge=0, le=1)
    """Probability that the infrared camera shows a person; who is neither visible nor warm is made warm."""


class Scenes(SceneDataset):
    """Scenes drawn once, kept in memory."""

    def __init__(self, settings: Settings, split: str, seed: int) -> None:
        check_common(settings.image_size, None)
        side = settings.image_size or 0
        count = settings.test_count if split == "test" else settings.count
        changes = None if split == "test" else changes_of(settings)
        super().__init__(_layout(settings), count, changes, settings.mosaic_epochs, seed)
        numbers = torch.Generator().manual_seed(mix(settings.data_seed, int(split == "test")))
        self.scenes = [
            draw_scene(side, settings.visible, settings.warm, numbers) for _ in range(count)
        ]

    def scene(self, index: int) -> Scene:
        """Return one scene, unchanged."""
        pictures, rows = self.scenes[index]
        return Scene([Image.fromarray(pictures[name]) for name in self.layout.cameras], rows)


def draw_scene(
    side: int, visible: float, warm: float, numbers: torch.Generator
) -> tuple[dict[str, np.ndarray], Rows]:
    """Return the pictures of both cameras (uint8, rgb (h, w, 3) and ir (h, w)) and the people's boxes."""

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=numbers)

    light = 0.12 + 0.5 * float(draw(1))
    rgb = functional.interpolate(draw(1, 3, 6, 6), size=(side, side), mode="bicubic")[0] * light
    heat = (
        functional.interpolate(draw(1, 1, 5, 5), size=(side, side), mode="bicubic")[0] * 0.35 + 0.1
    )
    boxes: list[list[float]] = []
    for _ in range(1 + int(draw(1) * MOST_PEOPLE)):
        height = side * (0.146 + 0.292 * float(draw(1)))
        width = height * (0.35 + 0.15 * float(draw(1)))
        x, y = (size / 2 + float(draw(1)) * (side - size) for size in (width, height))
        # Numbers are drawn whether or not they are used: a scene's choices must not shift those of the next.
        is_visible, is_warm = float(draw(1)) < visible, float(draw(1)) < warm
        colour, glow = (
            (rgb.mean() + 0.25 + 0.35 * draw(3, 1, 1)).clamp(0, 1),
            0.75 + 0.25 * float(draw(1)),
        )
        if any(
            abs(x - b[0]) < (width + b[2]) / 2 and abs(y - b[1]) < (height + b[3]) / 2
            for b in boxes
        ):
            continue
        boxes.append([x, y, width, height])
        cover = person(side, x, y, width, height)
        if is_visible:
            rgb = rgb * (1 - cover) + colour * cover
        if is_warm or not is_visible:
            heat = heat * (1 - cover) + glow * cover
    for _ in range(2):
        x, y, radius = *(side * draw(2)).tolist(), side * (0.031 + 0.052 * float(draw(1)))
        cover = disc(side, x, y, radius)
        heat = heat * (1 - cover) + 0.9 * cover
        x, y, width, height = (
            *(side * draw(2)).tolist(),
            *(side * (0.042 + 0.083 * draw(2))).tolist(),
        )
        cover = block(side, x, y, width, height)
        rgb = rgb * (1 - cover) + draw(3, 1, 1) * light * 1.2 * cover
    rgb = rgb + 0.03 * torch.randn(3, side, side, generator=numbers)
    heat = heat + 0.03 * torch.randn(1, side, side, generator=numbers)
    pictures = {"rgb": rgb.permute(1, 2, 0), "ir": heat[0]}
    table = np.array(boxes)
    corners = (
        np.concatenate((table[:, :2] - table[:, 2:] / 2, table[:, :2] + table[:, 2:] / 2), 1) / side
    )
    rows = np.concatenate((np.zeros((len(table), 1)), corners.clip(0, 1)), 1)
    return {
        name: (one.clamp(0, 1) * 255).round().byte().numpy() for name, one in pictures.items()
    }, rows


def _axes(side: int) -> tuple[Tensor, Tensor]:
    axis = torch.arange(side) + 0.5
    return axis[None, :], axis[:, None]


def person(side: int, x: float, y: float, width: float, height: float) -> Tensor:
    """Return how much of each pixel a standing figure covers: a head on a body that narrows upwards."""
    across, down = _axes(side)
    head = ((across - x).square() + (down - (y - height * 0.38)).square()).sqrt() - height * 0.12
    narrowing = 1 - 0.35 * ((down - y) / height + 0.1).clamp(0, 1)
    body = torch.maximum(
        (across - x).abs() - width * 0.5 * narrowing,
        torch.maximum(y - height * 0.28 - down, down - (y + height * 0.5)).expand(side, side),
    )
    return (0.5 - torch.minimum(head, body)).clamp(0, 1)


def disc(side: int, x: float, y: float, radius: float) -> Tensor:
    """Return how much of each pixel a disc covers."""
    across, down = _axes(side)
    return (0.5 - ((across - x).square() + (down - y).square()).sqrt() + radius).clamp(0, 1)


def block(side: int, x: float, y: float, width: float, height: float) -> Tensor:
    """Return how much of each pixel a block of half sides width and height covers."""
    across, down = _axes(side)
    return (0.5 - torch.maximum(((across - x).abs() - width), ((down - y).abs() - height))).clamp(
        0, 1
    )


def _layout(settings: Settings) -> Layout:
    side = settings.image_size or 0
    boxes = most_boxes(MOST_PEOPLE, settings.mosaic, settings.mixup)
    return Layout(SIDES[settings.cameras], side, side, boxes, CLASSES)


def build(settings: Settings, split: str, seed: int) -> Scenes:
    """Draw the scenes of one split."""
    return Scenes(settings, split, seed)


def sample_of_files(settings: Settings, data: DataSpec, files: Mapping[str, Path]) -> Batch:
    """Return one sample of the files that `mpt infer --input` was given. Raises DataError."""
    return read_sample(data, files, settings)


def assume(settings: Settings) -> DataSpec | None:
    """Return the layout, so that a plan draws nothing."""
    return None if settings.image_size is None else _layout(settings).spec(settings.count)
