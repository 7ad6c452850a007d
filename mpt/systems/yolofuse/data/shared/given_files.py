"""Files that a user gives for inference, as the data sets of scenes give their test samples: letterboxed, not cropped.

`mpt infer` and `mpt yolofuse detect` read files and map boxes back by the functions here, so that their boxes are the
same: in the pixels of the upright picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mpt.data.pictures.counts import Levels, as_bytes
from mpt.data.pictures.decoding import BadImageError
from mpt.errors import DataError
from mpt.seams import Batch, DataSpec
from mpt.systems.yolofuse.data.shared.detection_labels import NO_ROWS
from mpt.systems.yolofuse.data.shared.pair_files import read_picture
from mpt.systems.yolofuse.data.shared.scene_augmentation import (
    Scene,
    as_arrays,
    letterbox,
    letterbox_factor,
    letterbox_offset,
)
from mpt.systems.yolofuse.data.shared.scene_dataset import CHANNELS, canvas_of, levels_of

MAX_PIXELS = 100_000_000
OWN_SIZE = "own_size"
"""Field (2,) of a batch of given files: width and height of the picture before it was letterboxed."""

Rows = np.ndarray[Any, Any]


def read_sample(data: DataSpec, files: Mapping[str, Path], settings: object) -> Batch:
    """Return one sample's pictures, uint8 (c, h, w) by camera, and its own size. Raises DataError.

    `settings` are the data set's.
    """
    cameras = tuple(files)
    scene = read_given(files, levels_of(settings))
    height, width = data.fields[cameras[0]].shape[1:]
    arrays = as_arrays(letterbox(scene, *canvas_of(settings, width, height)))
    sample = {camera: torch.tensor(array) for camera, array in zip(cameras, arrays, strict=True)}
    return {**sample, OWN_SIZE: torch.tensor(scene.size)}


def read_given(files: Mapping[str, Path], levels: Levels) -> Scene:
    """Return the scene of a file for each camera. Raises DataError."""
    try:
        pictures = [
            read_picture(file, camera, MAX_PIXELS, levels) for camera, file in files.items()
        ]
    except BadImageError as error:
        raise DataError(f"--input: {error.path}: {error.reason}. Leave this file out") from error
    return scene_of(str(next(iter(files.values()))), pictures)


def frame_picture(name: Path, frame: torch.Tensor, camera: str, levels: Levels) -> Image.Image:
    """Return a video's frame, uint8 (3, h, w), as the picture that the camera's field holds."""
    image = Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy())
    if CHANNELS[camera] == 3:
        return image
    return Image.fromarray(as_bytes(name, np.asarray(image.convert("L")), levels))


def scene_of(name: str, pictures: list[Image.Image]) -> Scene:
    """Return a scene of pictures of one size. Raises DataError for two sizes."""
    if len({picture.size for picture in pictures}) > 1:
        sizes = " and ".join(f"{picture.width}x{picture.height}" for picture in pictures)
        raise DataError(
            f"--input: {name}: the cameras' pictures are {sizes} pixels; they must be registered to one size"
        )
    return Scene(pictures, NO_ROWS)


def in_own_pixels(
    rows: Rows, size: tuple[int, int], canvas: tuple[int, int], most: float = math.inf
) -> Rows:
    """Return the real rows of a padded list, from the letterboxed picture's pixels to the picture's own."""
    own = rows[rows[:, 4] > 0].astype(np.float64)
    factor = letterbox_factor(size, canvas, most)
    offset = letterbox_offset(size, canvas, most)
    own[:, :4] = (own[:, :4] - [*offset, *offset]) / factor
    own[:, [0, 2]] = own[:, [0, 2]].clip(0, size[0])
    own[:, [1, 3]] = own[:, [1, 3]].clip(0, size[1])
    return own
