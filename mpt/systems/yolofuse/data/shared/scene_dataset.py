"""Samples of pictures with boxes, as tensors: the common part of the detection data sets.

The source of a scene is the subclass's business (`scene`). Everything drawn by chance depends on (seed, epoch,
index) alone. Pictures stay uint8. No box is ever left out: a batch pads boxes to the need of its fullest sample,
in a few lengths, and the layout, by which memory is planned, has room for the fullest sample that the data can give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mpt.config.options import DatasetOptions
from mpt.data.pictures.counts import Levels
from mpt.data.pictures.padding import pad_rows
from mpt.data.pictures.seeds import mix
from mpt.errors import ConfigError
from mpt.seams import Batch, Dataset, DataSpec, FieldSpec
from mpt.systems.yolofuse.data.shared.detection_labels import NO_ROWS, crowd_of
from mpt.systems.yolofuse.data.shared.scene_augmentation import (
    Canvas,
    Changes,
    Scene,
    as_arrays,
    change,
    letterbox,
)
from mpt.systems.yolofuse.data.shared.scene_settings import SceneOptions

CHANNELS = {"rgb": 3, "ir": 1}
SIDES = {"pair": ("rgb", "ir"), "rgb": ("rgb",), "ir": ("ir",)}
MOSAIC_PICTURES = 4
FEWEST_ROWS = 8
SHOWN = "shown"
"""Field (4,) of a batch of test samples: the picture's place on the canvas, corners in pixels."""


@dataclass(frozen=True)
class Layout:
    """The layout of a data set: the cameras, the size in pixels, the room for boxes and the classes."""

    cameras: tuple[str, ...]
    width: int
    height: int
    most_boxes: int
    classes: tuple[str, ...]
    most_enlarged: float = math.inf
    """How much a test picture may be enlarged to fill the canvas."""

    def spec(self, size: int) -> DataSpec:
        """Return the batch's layout."""
        shape, boxes = (self.height, self.width), self.most_boxes
        fields = {
            name: FieldSpec((CHANNELS[name], *shape), torch.uint8, "image") for name in self.cameras
        }
        fields |= {
            "boxes": FieldSpec((boxes, 4), torch.float32, "boxes"),
            "classes": FieldSpec((boxes,), torch.int64),
            "box_mask": FieldSpec((boxes,), torch.bool),
        }
        return DataSpec(fields, size, self.classes)


def most_boxes(largest: int, mosaic: float, mixup: float) -> int:
    """Return the most boxes of a sample of pictures of up to `largest`: four in a mosaic, twice that in a mixup."""
    return max(largest, 1) * (MOSAIC_PICTURES if mosaic > 0 else 1) * (2 if mixup > 0 else 1)


def padded_length(needed: int, most: int) -> int:
    """Return the length to which a batch's boxes are padded: the next power of two, so that lengths are few.

    At most the layout's `most`, unless a sample has more.
    """
    power = max(FEWEST_ROWS, 1 << max(needed - 1, 0).bit_length())
    return max(needed, min(power, most))


class SceneDataset(Dataset):
    """Scenes, changed by chance in training and letterboxed in testing."""

    def __init__(
        self,
        layout: Layout,
        size: int,
        changes: Changes | None,
        mosaic_epochs: int | None,
        seed: int,
    ) -> None:
        self.layout, self.changes, self.mosaic_epochs, self.seed = (
            layout,
            changes,
            mosaic_epochs,
            seed,
        )
        self.spec = layout.spec(size)
        self.bad_files: dict[str, str] = {}
        """Skipped samples, and the reasons."""

    def __len__(self) -> int:
        return self.spec.size

    def scene(self, index: int) -> Scene:
        """Return one scene, unchanged."""
        raise NotImplementedError

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return a batch: a picture field per camera, `boxes` in pixels, `classes`, `box_mask`.

        Test samples have `shown` too, and the regions of crowds as boxes that the mask leaves out.
        """
        canvases = [self.canvas(index, epoch) for index in indices]
        pictures = zip(*(as_arrays(canvas) for canvas in canvases), strict=True)
        batch = {
            name: torch.from_numpy(np.stack(arrays))
            for name, arrays in zip(self.layout.cameras, pictures, strict=True)
        }
        tests = self.changes is None
        rows = [
            torch.from_numpy(own if tests else own[own[:, 0] >= 0])
            for own in (canvas.boxes if len(canvas.boxes) else NO_ROWS for canvas in canvases)
        ]
        length = padded_length(max(map(len, rows)), self.layout.most_boxes)
        boxes, mask = pad_rows([own[:, 1:].float() for own in rows], length)
        kinds, _ = pad_rows([own[:, 0].long() for own in rows], length)
        mask, kinds = mask & (kinds >= 0), torch.where(kinds < 0, crowd_of(kinds), kinds)
        if tests:
            batch[SHOWN] = torch.tensor([canvas.shown for canvas in canvases])
        return {**batch, "boxes": boxes, "classes": kinds, "box_mask": mask}

    def canvas(self, index: int, epoch: int) -> Canvas:
        """Return one sample as it is delivered."""
        width, height, changes = self.layout.width, self.layout.height, self.changes
        if changes is None:
            return letterbox(self.scene(index), width, height, self.layout.most_enlarged)
        if self.mosaic_epochs is not None and epoch >= self.mosaic_epochs:
            changes = Changes(**{**vars(changes), "mosaic": 0.0, "mixup": 0.0})
        draw = np.random.default_rng(mix(self.seed, epoch, index))
        return change(self.scene, index, len(self), width, height, changes, draw)


def changes_of(settings: DatasetOptions) -> Changes:
    """Return the changes that a data set's settings name; those that it has no setting for change nothing."""
    return Changes(
        **{name: value for name, value in settings if name in Changes.__dataclass_fields__}
    )


def levels_of(settings: object) -> Levels:
    """Return the range of infrared files that a data set's settings name, the default for settings without one."""
    if not isinstance(settings, SceneOptions):
        return Levels()
    chosen = settings.ir_range
    low, high = settings.ir_percentiles
    return Levels((chosen[0], chosen[1]) if isinstance(chosen, list) else chosen, (low, high))


def canvas_of(settings: object, width: int, height: int) -> tuple[int, int, float]:
    """Return width and height of the canvas of test pictures and given files, and how much they may be enlarged.

    It is the network's input, or the larger square of `dataset.canvas`, on which pictures keep their own size if they
    can.
    """
    side = settings.canvas if isinstance(settings, SceneOptions) else None
    return (width, height, math.inf) if side is None else (side, side, 1.0)


def check_common(image_size: int | None, height: int | None, canvas: int | None = None) -> None:
    """Refuse sizes that no picture can have. Raises ConfigError."""
    if canvas is not None and image_size is not None and canvas <= image_size:
        raise ConfigError(
            f"dataset.canvas={canvas} is for pictures that are larger than the network's input, of image_size="
            f"{image_size}; choose more, or leave it out"
        )
    if image_size is None:
        raise ConfigError(
            "dataset.image_size is not set, and the model does not say what it wants: set it"
        )
    if height is not None and height > image_size:
        raise ConfigError(
            f"dataset.height={height} is above image_size={image_size}, which is the width"
        )
