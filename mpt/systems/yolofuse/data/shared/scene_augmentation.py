"""Random changes to pictures with boxes, the same for every camera: mosaic, mixup, scale, shift, flips, HSV.

Every change of place is along the axes, so each picture is resized once, straight to its final place, and everything
that falls off is cut: there is no canvas of twice the size to fill and to warp. The meaning of the settings is that of
YOLOv8 (mosaic of four about a random centre, then a scale of 1 +- `scale` and a shift of +- `translate` about the
middle; boxes stay if at least 3 pixels and a tenth of their area are left, of a mosaic that on its plane).

All numbers come from one generator per (seed, epoch, index). Pictures are lists of uint8 Pillow images, one per camera,
of one size; boxes are rows (class, left, top, right, bottom), relative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from mpt.systems.yolofuse.data.shared.detection_labels import NO_ROWS, Rows

GREY = 114
LEAST_PIXELS = 2.0
LEAST_AREA = 0.1
LARGEST_ASPECT = 100.0

Array = np.ndarray[Any, Any]


@dataclass
class Scene:
    """One sample: a picture per camera, and its boxes relative to the pictures' size."""

    pictures: list[Image.Image]
    rows: Rows

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.pictures[0].size


@dataclass(frozen=True)
class Changes:
    """How strong each change is; zeros change nothing."""

    mosaic: float = 0.0
    mixup: float = 0.0
    flip_across: float = 0.0
    flip_down: float = 0.0
    hue: float = 0.0
    saturation: float = 0.0
    brightness: float = 0.0
    translate: float = 0.0
    scale: float = 0.0


class Canvas:
    """An output picture per camera, and the boxes (class, corners in pixels) that lie on it."""

    def __init__(self, cameras: list[Image.Image], width: int, height: int) -> None:
        self.size = (width, height)
        self.pictures = [
            Image.new(one.mode, self.size, GREY if one.mode == "L" else (GREY,) * 3)
            for one in cameras
        ]
        self.boxes = NO_ROWS
        self.shown = (0.0, 0.0, float(width), float(height))
        """Left, top, right and bottom of a letterboxed picture."""

    def place(
        self,
        scene: Scene,
        window: tuple[float, float, float, float],
        factor: float,
        x: float,
        y: float,
        keeps_all: bool = False,
    ) -> None:
        """Put a scene at (x, y), resized by a factor, cut to a window (left, top, right, bottom) of its plane.

        Boxes that become too small to learn from are left out unless all are kept. Their share counts from the part
        inside the window, which may reach over the canvas.
        """
        width, height = scene.size
        left, top = max(window[0], x, 0), max(window[1], y, 0)
        right, bottom = (
            min(window[2], x + width * factor, self.size[0]),
            min(window[3], y + height * factor, self.size[1]),
        )
        first = (round(left), round(top))
        shape = (round(right) - first[0], round(bottom) - first[1])
        if min(shape) <= 0:
            return
        # The source region in its own pixels; Pillow resizes it with its own antialiasing.
        box = ((first[0] - x) / factor, (first[1] - y) / factor)
        region = (*box, box[0] + shape[0] / factor, box[1] + shape[1] / factor)
        region = tuple(  # rounding may leave the picture by a fraction of a pixel
            float(np.clip(side, 0, limit))
            for side, limit in zip(region, (width, height) * 2, strict=True)
        )  # type: ignore[assignment]
        for ours, theirs in zip(self.pictures, scene.pictures, strict=True):
            ours.paste(theirs.resize(shape, Image.Resampling.BILINEAR, box=region), first)
        if len(scene.rows):
            boxes = scene.rows.copy()
            boxes[:, 1:] = boxes[:, 1:] * ([width * factor, height * factor] * 2) + [x, y, x, y]
            boxes[:, [1, 3]] = boxes[:, [1, 3]].clip(window[0], window[2])
            boxes[:, [2, 4]] = boxes[:, [2, 4]].clip(window[1], window[3])
            before = areas(boxes)
            boxes[:, [1, 3]] = boxes[:, [1, 3]].clip(left, right)
            boxes[:, [2, 4]] = boxes[:, [2, 4]].clip(top, bottom)
            self.boxes = np.concatenate(
                (self.boxes, boxes if keeps_all else boxes[visible(boxes, before)])
            )


def areas(boxes: Rows) -> Array:
    """Return the areas of rows of boxes."""
    return np.asarray((boxes[:, 3] - boxes[:, 1]) * (boxes[:, 4] - boxes[:, 2]))


def visible(boxes: Rows, before: Array) -> Array:
    """Say which boxes, in pixels, are worth keeping, given their areas before they were cut."""
    width, height = boxes[:, 3] - boxes[:, 1], boxes[:, 4] - boxes[:, 2]
    aspect = np.maximum(width / np.maximum(height, 1e-9), height / np.maximum(width, 1e-9))
    enough = areas(boxes) > LEAST_AREA * before
    return np.asarray(
        (width > LEAST_PIXELS) & (height > LEAST_PIXELS) & enough & (aspect < LARGEST_ASPECT)
    )


def letterbox(scene: Scene, width: int, height: int, most: float = math.inf) -> Canvas:
    """Return a scene in the middle of the canvas, as large as it fits, without any change by chance.

    It is enlarged `most` times at most, and all its boxes are kept.
    """
    canvas = Canvas(scene.pictures, width, height)
    x, y = letterbox_offset(scene.size, (width, height), most)
    everything = (0.0, 0.0, float(width), float(height))
    factor = letterbox_factor(scene.size, (width, height), most)
    canvas.place(scene, everything, factor, x, y, keeps_all=True)
    canvas.shown = (x, y, x + scene.size[0] * factor, y + scene.size[1] * factor)
    return canvas


def letterbox_factor(
    size: tuple[int, int], canvas: tuple[int, int], most: float = math.inf
) -> float:
    """Return how a picture is enlarged so that it fits; sizes are width and height."""
    return min(canvas[0] / size[0], canvas[1] / size[1], most)


def letterbox_offset(
    size: tuple[int, int], canvas: tuple[int, int], most: float = math.inf
) -> tuple[float, float]:
    """Return the final place of a picture's left top corner, in whole pixels."""
    factor = letterbox_factor(size, canvas, most)
    return (
        float(round((canvas[0] - size[0] * factor) / 2)),
        float(round((canvas[1] - size[1] * factor) / 2)),
    )


def change(
    load: Callable[[int], Scene],
    index: int,
    count: int,
    width: int,
    height: int,
    how: Changes,
    draw: np.random.Generator,
) -> Canvas:
    """Return sample `index` of `count` with its random changes; `load` gives any sample."""
    canvas = _arranged(load, index, count, width, height, how, draw)
    if draw.random() < how.mixup:
        other = _arranged(load, int(draw.integers(count)), count, width, height, how, draw)
        share = float(draw.beta(32.0, 32.0))
        canvas.pictures = [
            Image.blend(b, a, share) for a, b in zip(canvas.pictures, other.pictures, strict=True)
        ]
        canvas.boxes = np.concatenate((canvas.boxes, other.boxes))
    _colour(canvas, how, draw)
    if draw.random() < how.flip_across:
        canvas.pictures = [
            one.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for one in canvas.pictures
        ]
        canvas.boxes[:, [1, 3]] = width - canvas.boxes[:, [3, 1]]
    if draw.random() < how.flip_down:
        canvas.pictures = [
            one.transpose(Image.Transpose.FLIP_TOP_BOTTOM) for one in canvas.pictures
        ]
        canvas.boxes[:, [2, 4]] = height - canvas.boxes[:, [4, 2]]
    return canvas


def _arranged(
    load: Callable[[int], Scene],
    index: int,
    count: int,
    width: int,
    height: int,
    how: Changes,
    draw: np.random.Generator,
) -> Canvas:
    """Return one picture or a mosaic of four, scaled and shifted."""
    scene = load(index)
    canvas = Canvas(scene.pictures, width, height)
    is_mosaic = draw.random() < how.mosaic
    factor = float(draw.uniform(1 - how.scale, 1 + how.scale))
    shift_x, shift_y = (
        side * float(draw.uniform(-how.translate, how.translate)) for side in (width, height)
    )
    middle_x, middle_y = width / 2 + shift_x, height / 2 + shift_y
    if not is_mosaic:
        size = scene.size
        fit = min(width / size[0], height / size[1]) * factor
        canvas.place(
            scene,
            (-math.inf, -math.inf, math.inf, math.inf),
            fit,
            middle_x - size[0] * fit / 2,
            middle_y - size[1] * fit / 2,
        )
        return canvas
    # The four meet at a point of a plane of twice the size; its middle comes to the canvas's middle.
    meet_x = middle_x + factor * width * float(draw.uniform(-0.5, 0.5))
    meet_y = middle_y + factor * height * float(draw.uniform(-0.5, 0.5))
    edges = (
        middle_x - factor * width,
        middle_y - factor * height,
        middle_x + factor * width,
        middle_y + factor * height,
    )
    others = [load(int(number)) for number in draw.integers(count, size=3)]
    for number, part in enumerate((scene, *others)):
        size = part.size
        fit = min(width / size[0], height / size[1]) * factor
        wide, high = size[0] * fit, size[1] * fit
        is_left, is_top = number % 2 == 0, number < 2
        window = (
            edges[0] if is_left else meet_x,
            edges[1] if is_top else meet_y,
            meet_x if is_left else edges[2],
            meet_y if is_top else edges[3],
        )
        canvas.place(part, window, fit, meet_x - wide * is_left, meet_y - high * is_top)
    return canvas


def _colour(canvas: Canvas, how: Changes, draw: np.random.Generator) -> None:
    """Change hue, saturation and brightness, by the same gains for every camera; of a grey one the brightness."""
    gains = 1 + draw.uniform(-1, 1, 3) * (how.hue, how.saturation, how.brightness)
    if not (how.hue or how.saturation or how.brightness):
        return
    steps = np.arange(256)
    hue = (steps * gains[0]).astype(np.int64) % 256
    rest = [(steps * gain).clip(0, 255).astype(np.int64) for gain in gains[1:]]
    for number, picture in enumerate(canvas.pictures):
        if picture.mode == "L":
            canvas.pictures[number] = picture.point(rest[1].tolist())
        else:
            table = [*hue.tolist(), *rest[0].tolist(), *rest[1].tolist()]
            canvas.pictures[number] = picture.convert("HSV").point(table).convert("RGB")


def as_arrays(canvas: Canvas) -> list[Array]:
    """Return the pictures as uint8 (c, h, w)."""
    arrays = [np.asarray(picture, np.uint8) for picture in canvas.pictures]
    return [
        array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))
        for array in arrays
    ]
