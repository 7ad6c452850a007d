"""Samples of pictures with boxes, as tensors: what the detection data sets share.

Where a scene comes from is the subclass's business (`scene`). Everything drawn by chance depends on (seed, epoch,
index) alone. Pictures stay uint8; boxes are padded to one length, and where a sample has more, the largest are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mpt.config.options import DatasetOptions
from mpt.data.padding import pad_rows
from mpt.data.seeds import mix
from mpt.errors import ConfigError
from mpt.seams import Batch, Dataset, DataSpec, FieldSpec
from mpt.systems.yolofuse.data.detection_labels import NO_ROWS
from mpt.systems.yolofuse.data.scene_augmentation import (
    Canvas,
    Changes,
    Scene,
    areas,
    as_arrays,
    change,
    letterbox,
)

CHANNELS = {"rgb": 3, "ir": 1}
SIDES = {"pair": ("rgb", "ir"), "rgb": ("rgb",), "ir": ("ir",)}
MOST_BOXES = 300
MOSAIC_PICTURES = 4


@dataclass(frozen=True)
class Layout:
    """What a data set delivers: the cameras, the size in pixels, the boxes' padding and the classes."""

    cameras: tuple[str, ...]
    width: int
    height: int
    most_boxes: int
    classes: tuple[str, ...]

    def spec(self, size: int) -> DataSpec:
        """Return the batch's layout."""
        shape, boxes = (self.height, self.width), self.most_boxes
        fields = {name: FieldSpec((CHANNELS[name], *shape), torch.uint8, "image") for name in self.cameras}
        fields |= {
            "boxes": FieldSpec((boxes, 4), torch.float32, "boxes"),
            "classes": FieldSpec((boxes,), torch.int64),
            "box_mask": FieldSpec((boxes,), torch.bool),
        }
        return DataSpec(fields, size, self.classes)


def most_boxes(largest: int, mosaic: float, mixup: float) -> int:
    """Return the padding for pictures of up to `largest` boxes: room for four in a mosaic, twice that for a mixup."""
    room = largest * (MOSAIC_PICTURES if mosaic > 0 else 1) * (2 if mixup > 0 else 1)
    return min(max(room, 1), MOST_BOXES)


class SceneDataset(Dataset):
    """Scenes, changed by chance in training and letterboxed in testing."""

    def __init__(
        self, layout: Layout, size: int, changes: Changes | None, mosaic_epochs: int | None, seed: int
    ) -> None:
        self.layout, self.changes, self.mosaic_epochs, self.seed = layout, changes, mosaic_epochs, seed
        self.spec = layout.spec(size)
        self.bad_files: dict[str, str] = {}
        """What was passed over, and why."""

    def __len__(self) -> int:
        return self.spec.size

    def scene(self, index: int) -> Scene:
        """Return one scene, unchanged."""
        raise NotImplementedError

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return a batch: a picture field per camera, `boxes` in pixels, `classes`, `box_mask`."""
        canvases = [self.canvas(index, epoch) for index in indices]
        pictures = zip(*(as_arrays(canvas) for canvas in canvases), strict=True)
        batch = {
            name: torch.from_numpy(np.stack(arrays)) for name, arrays in zip(self.layout.cameras, pictures, strict=True)
        }
        rows = [torch.from_numpy(self.kept(canvas)) for canvas in canvases]
        boxes, mask = pad_rows([own[:, 1:].float() for own in rows], self.layout.most_boxes)
        kinds, _ = pad_rows([own[:, 0].long() for own in rows], self.layout.most_boxes)
        return {**batch, "boxes": boxes, "classes": kinds, "box_mask": mask}

    def canvas(self, index: int, epoch: int) -> Canvas:
        """Return one sample as it is delivered."""
        width, height, changes = self.layout.width, self.layout.height, self.changes
        if changes is None:
            return letterbox(self.scene(index), width, height)
        if self.mosaic_epochs is not None and epoch >= self.mosaic_epochs:
            changes = Changes(**{**vars(changes), "mosaic": 0.0, "mixup": 0.0})
        draw = np.random.default_rng(mix(self.seed, epoch, index))
        return change(self.scene, index, len(self), width, height, changes, draw)

    def kept(self, canvas: Canvas) -> np.ndarray:
        """Return the boxes of a canvas, the largest of them where there are too many."""
        boxes = canvas.boxes if len(canvas.boxes) else NO_ROWS
        if len(boxes) > self.layout.most_boxes:
            largest = np.argsort(-areas(boxes), kind="stable")[: self.layout.most_boxes]
            boxes = boxes[np.sort(largest)]
        return boxes


def changes_of(settings: DatasetOptions) -> Changes:
    """Return the changes that a data set's settings name; those that it has no setting for change nothing."""
    return Changes(**{name: value for name, value in settings if name in Changes.__dataclass_fields__})


def check_common(image_size: int | None, height: int | None, channels: int | None, augment: Sequence[object]) -> None:
    """Refuse settings that would part the cameras or the boxes from each other. Raises ConfigError."""
    if image_size is None:
        raise ConfigError("dataset.image_size is not set, and the model does not say what it wants: set it")
    if channels is not None:
        raise ConfigError("dataset.channels: the cameras have 3 channels (rgb) and 1 (ir); leave it out")
    if augment:
        raise ConfigError(
            "dataset.augment: pictures are changed together with their boxes, by mosaic, mixup, flip_across, "
            "flip_down, hue, saturation, brightness, translate and scale; leave augment out"
        )
    if height is not None and height > image_size:
        raise ConfigError(f"dataset.height={height} is above image_size={image_size}, which is the width")
