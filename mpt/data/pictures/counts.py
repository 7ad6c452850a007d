"""Pixels as the numbers that a file holds, of any depth, and the range of them that becomes 8 bits.

Thermal cameras write counts or kelvins: 16 bits of which a scene fills a few per cent, or floats. Shifted by 8 bits, as
a photograph is, a scene of 3,000 to 4,275 counts would become the greys 11 to 16. So the range is chosen: fixed, the
same for all pictures (training and later inputs then agree), or each picture's own.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from mpt.data.pictures.decoding import (
    FORMATS,
    MOST_PIXEL_BYTES,
    TURNS,
    BadImageError,
    check_pixels,
    convert_mode,
    failures_as_bad_image,
    turn_of,
)
from mpt.data.pictures.fitting import LUMINANCE
from mpt.errors import ConfigError
from mpt.foreign.files import LARGEST_PICTURE_BYTES, open_foreign, read_bytes

Counts = NDArray[Any]
FULL_16_BITS = 65535
TURNED: dict[Image.Transpose, Callable[[Counts], Counts]] = {
    Image.Transpose.FLIP_LEFT_RIGHT: numpy.fliplr,
    Image.Transpose.ROTATE_180: lambda pixels: numpy.rot90(pixels, 2),
    Image.Transpose.FLIP_TOP_BOTTOM: numpy.flipud,
    Image.Transpose.TRANSPOSE: numpy.transpose,
    Image.Transpose.ROTATE_270: lambda pixels: numpy.rot90(pixels, 3),
    Image.Transpose.TRANSVERSE: lambda pixels: numpy.rot90(pixels, 2).transpose(),
    Image.Transpose.ROTATE_90: numpy.rot90,
}
"""As Pillow turns, for arrays of any depth."""


@dataclass(frozen=True)
class Levels:
    """Which numbers become 0 and 255: `full` is all that the depth can hold, `picture` a picture's least and largest,
    `percentile` two percentiles of each picture, two numbers a fixed range.

    None leaves 8 bits as they are, and floats from 0 to 1 their range; deeper pixels are then refused.
    """

    range: Literal["full", "picture", "percentile"] | tuple[float, float] | None = None
    percentiles: tuple[float, float] = (1.0, 99.0)
    setting: str = "dataset.ir_range"
    """Its name in messages."""


def read_grey(path: Path, max_pixels: int, levels: Levels) -> Image.Image:
    """Return a file as an upright picture in 8-bit grey. Raises BadImageError, and ConfigError if no range is set.

    Colour becomes luminance, alpha is dropped.
    """
    counts = read_counts(path, max_pixels)
    return Image.fromarray(as_bytes(path, counts, levels))


def read_counts(path: Path, max_pixels: int) -> Counts:
    """Return the numbers of an upright picture (h, w) in grey, uint8 or as deep as the file. Raises BadImageError."""
    most_bytes = max(LARGEST_PICTURE_BYTES, MOST_PIXEL_BYTES * max_pixels)
    with failures_as_bad_image(path, max_pixels), open_foreign(path, most_bytes) as file:
        try:
            opened = Image.open(file, formats=FORMATS)
        except UnidentifiedImageError:
            if path.suffix.lower() not in (".tif", ".tiff"):
                raise
            # floats or 16 bits in several channels, unknown to Pillow
            return read_deep_colour(path, most_bytes)
        with opened as image:
            check_pixels(path, image, max_pixels)
            # asked first: a PNG is decoded for its orientation
            is_deep_colour = holds_deep_colour(image)
            turn = turn_of(image)
            if is_deep_colour:
                # of a TIFF too, not decoded here
                orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
                return read_deep_colour(path, most_bytes, TURNS.get(orientation))
            grey = image if is_deep_grey(image) else convert_mode(path, image, "L")
            grey = grey if turn is None else grey.transpose(turn)
            return numpy.array(grey)


def is_deep_grey(image: Image.Image) -> bool:
    """Return whether an opened picture has one channel of more than 8 bits."""
    return image.mode == "F" or image.mode.startswith("I")


def holds_deep_colour(image: Image.Image) -> bool:
    """Return whether a file has several channels of 16 bits, of which Pillow would give the upper 8."""
    return any(
        "16" in str(tile[3]) for tile in cast("ImageFile.ImageFile", image).tile
    ) and not is_deep_grey(image)


def read_deep_colour(path: Path, most_bytes: int, turn: Image.Transpose | None = None) -> Counts:
    """Return a picture of three channels or four, of 16 bits or floats, as grey (h, w), read by OpenCV.

    Raises BadImageError if that is not installed, and for other numbers of channels.
    """
    if importlib.util.find_spec("cv2") is None:
        raise BadImageError(
            path,
            "several channels of more than 8 bits are read by OpenCV, which is not installed (pip install "
            "opencv-python-headless); or save one channel",
        )
    opencv: Any = importlib.import_module("cv2")
    content = numpy.frombuffer(read_bytes(path, most_bytes), numpy.uint8)
    pixels = opencv.imdecode(content, opencv.IMREAD_UNCHANGED)  # not turned either
    # it reduces values that it cannot hold
    if pixels is None or pixels.dtype == numpy.uint8 or pixels.ndim != 3:
        raise BadImageError(
            path,
            "not a picture of 1, 3 or 4 channels of a known kind (jpg, png, ppm, bmp, tif, webp)",
        )
    colour = pixels[..., 2::-1].astype(numpy.float64)  # OpenCV's order is blue, green, red
    grey = colour @ numpy.array(LUMINANCE)
    grey = (
        grey.round().astype(pixels.dtype)
        if pixels.dtype.kind in "ui"
        else grey.astype(pixels.dtype)
    )
    return numpy.ascontiguousarray(grey if turn is None else TURNED[turn](grey))


def as_bytes(path: Path, counts: Counts, levels: Levels) -> NDArray[numpy.uint8]:
    """Return numbers in 8 bits, those outside of the range at its ends.

    Raises BadImageError for numbers that are not finite or all outside of a fixed range, ConfigError for deep numbers
    without a range.
    """
    if counts.dtype == numpy.uint8 and levels.range in (None, "full"):
        return counts
    least, most = float(counts.min()), float(counts.max())
    if not (numpy.isfinite(least) and numpy.isfinite(most)):
        raise BadImageError(path, "it has pixels that are no finite numbers")
    is_float = counts.dtype.kind == "f"
    if is_float and levels.range in (None, "full") and least >= 0 and most <= 1:
        return (counts * 255).round().astype(numpy.uint8)
    if levels.range is None:
        raise ConfigError(describe_choice(path, counts, levels))
    if levels.range == "full":
        if is_float or least < 0 or most > FULL_16_BITS:
            raise BadImageError(
                path,
                f"pixels from {least:g} to {most:g}: {levels.setting}=full is for 16 bits and for floats from 0 to 1",
            )
        return (counts.astype(numpy.int64) >> 8).astype(numpy.uint8)
    low, high = range_of(counts, levels)
    if isinstance(levels.range, tuple) and (most <= low or least >= high):
        raise BadImageError(
            path,
            f"its pixels from {least:g} to {most:g} lie outside of {levels.setting}={low:g},{high:g}",
        )
    scaled = (counts.astype(numpy.float32) - low) * (255 / max(high - low, 1e-12))
    return scaled.round().clip(0, 255).astype(numpy.uint8)


def range_of(counts: Counts, levels: Levels) -> tuple[float, float]:
    """Return the numbers that become 0 and 255."""
    if isinstance(levels.range, tuple):
        return levels.range
    if levels.range == "picture":
        return float(counts.min()), float(counts.max())
    low, high = numpy.percentile(counts, levels.percentiles)
    return float(low), float(high)


def describe_choice(path: Path, counts: Counts, levels: Levels) -> str:
    """Return the choices, with this picture's numbers."""
    low, high = numpy.percentile(counts, levels.percentiles)
    depth = f"{counts.dtype.itemsize * 8}-bit {'float' if counts.dtype.kind == 'f' else 'whole'} numbers"
    least, most = counts.min(), counts.max()
    return (
        f"{path}: its pixels are {depth} from {least:g} to {most:g}, most of them from {low:g} to {high:g}. Set "
        f"{levels.setting}: two numbers such as [{least:g}, {most:g}] are one range for all pictures, percentile and "
        "picture each picture's own, full is 0 to 65535"
    )
