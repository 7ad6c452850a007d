"""One image file in: checked before it is decoded, and named when it is bad.

The size is read from the header first, so that a small file that unpacks to gigabytes is refused before anything is
allocated. Only plain raster formats are opened; Pillow would otherwise also hand files to outside programs (EPS). Image
orientation tags are ignored, as torchvision ignores them.
"""

from __future__ import annotations

import math
import os
import stat
import struct
import warnings
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from mpt.errors import DataError

Fit = Literal["crop", "letterbox", "stretch"]
"""How a picture of other proportions is brought to a size: the largest centred part of it; all of it between black
bars; all of it, distorted."""
Box = tuple[int, int, int, int]
"""A part of a picture in pixels: left, top, right, bottom, the last two outside of it."""
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""As torchvision's ImageFolder."""
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
REDUCING_GAP = 2
"""How much larger than wanted, in width and height, a picture is at least decoded: what is left is resized well."""
DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, struct.error, zlib.error)
"""What Pillow's decoders raise on damaged files, beside Image.DecompressionBombError."""


class BadImageError(DataError):
    """An image file that cannot or may not be decoded. `reason` says why, without the path."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path}: {reason}. Replace or remove the file, or set dataset.on_bad_image=skip to train without it"
        )
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple[type[BadImageError], tuple[Path, str]]:
        return type(self), (self.path, self.reason)


def decode_bytes(
    path: Path,
    channels: int,
    size: tuple[int, int] | None,
    max_pixels: int,
    fit: Fit = "crop",
    *,
    reduces: bool = False,
    choose_cut: Callable[[int, int], Box] | None = None,
) -> Tensor:
    """Return an image file as uint8 (channels, h, w). Raises BadImageError.

    With a `size` (height, width) it is brought to these proportions as `fit` says and resized (bilinear, antialiased);
    without, it is left as stored. If it `reduces`, a JPEG of more than twice the size is decoded smaller first, and
    one that is decoded whole by simplejpeg, where that is installed: to the same pixels, in three quarters of the time.
    `choose_cut` is asked for the only part to return, given the picture's width and height; its channels stay last in
    memory.
    """
    try:
        with warnings.catch_warnings():
            # Pillow's own warnings about large, odd or damaged files: the limit here is max_pixels, damage raises.
            warnings.simplefilter("ignore")
            with open_regular_file(path) as file, Image.open(file, formats=FORMATS) as image:
                width, height = image.size
                if width * height > max_pixels:
                    raise BadImageError(
                        path, f"{width} x {height} pixels are more than dataset.max_pixels={max_pixels}"
                    )
                if reduces and size is not None:
                    reduce_while_decoding(image, size[::-1], fit)
                stored = decoded_faster(file, image) if reduces and image.size == (width, height) else image
                picture = convert_mode(path, stored, MODES[channels])
                if choose_cut is not None:
                    picture = picture.crop(choose_cut(*picture.size))
                if size is not None and picture.size != size[::-1]:
                    picture = fitted(picture, size[::-1], fit)
                pixels = numpy.array(picture, dtype=numpy.uint8)
    except BadImageError:
        raise
    except Image.DecompressionBombError as error:
        raise BadImageError(path, f"more pixels than dataset.max_pixels={max_pixels}") from error
    except FileNotFoundError as error:
        raise BadImageError(path, "the file is gone") from error
    except UnidentifiedImageError as error:
        raise BadImageError(path, "not an image of a known kind (jpg, png, ppm, bmp, tif, webp)") from error
    except DECODER_ERRORS as error:
        raise BadImageError(path, f"cannot be decoded ({error})") from error
    tensor = torch.from_numpy(pixels)
    if tensor.dim() == 2:
        return tensor[None]
    planes = tensor.permute(2, 0, 1)
    return planes.contiguous() if choose_cut is None else planes


def reduce_while_decoding(image: Image.Image, size: tuple[int, int], fit: Fit) -> None:
    """Let a JPEG be decoded at a half, a quarter or an eighth of its size, as small as leaves `REDUCING_GAP` times the
    pixels that are wanted. Other formats stay as they are.
    """
    width, height = size
    if fit == "letterbox":
        scale = min(width / image.width, height / image.height)
        width, height = math.ceil(image.width * scale), math.ceil(image.height * scale)
    image.draft(image.mode, (REDUCING_GAP * width, REDUCING_GAP * height))


def decoded_faster(file: BinaryIO, image: Image.Image) -> Image.Image:
    """Return a JPEG as it was opened, or what simplejpeg makes of the file; for what that refuses Pillow answers."""
    decode = jpeg_decoder()
    if decode is None or image.format != "JPEG" or image.mode != "RGB":
        return image
    file.seek(0)
    try:
        pixels = decode(file.read())
    except ValueError:
        pixels = None
    if pixels is not None and pixels.shape == (image.height, image.width, 3):
        return Image.fromarray(pixels)
    file.seek(0)
    return Image.open(file, formats=("JPEG",))


@cache
def jpeg_decoder() -> Callable[[bytes], NDArray[numpy.uint8]] | None:
    """Return simplejpeg's decoder of a file's bytes to RGB, None where it is not installed (extra `jpeg`)."""
    try:
        from simplejpeg import decode_jpeg
    except ImportError:
        return None
    decoder: Callable[[bytes], NDArray[numpy.uint8]] = decode_jpeg
    return decoder


def fitted(picture: Image.Image, size: tuple[int, int], fit: Fit) -> Image.Image:
    """Return a picture in another size (width, height)."""
    method = Image.Resampling.BILINEAR
    if fit == "letterbox":
        return ImageOps.pad(picture, size, method=method, color=0)
    if fit == "stretch":
        return picture.resize(size, method)
    return ImageOps.fit(picture, size, method=method)


def open_regular_file(path: Path) -> BinaryIO:
    """Open a file, by way of links too. Raises BadImageError for a pipe, on which reading would wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadImageError(path, "not a regular file")
    return os.fdopen(descriptor, "rb")


def convert_mode(path: Path, image: Image.Image, mode: str) -> Image.Image:
    """Return the picture in 8 bits as `L`, `RGB` or `RGBA`. Raises BadImageError for a range that no image has.

    Pillow's own conversion would clip what has more than 8 bits at 255, and round fractions to 0 and 1.
    """
    if image.mode.startswith("I"):
        deep = numpy.asarray(image).astype(numpy.int64)
        if image.mode == "I" and not (deep.min() >= 0 and deep.max() <= 65535):
            raise BadImageError(
                path, f"32-bit pixels from {deep.min()} to {deep.max()}: save them in 16 bits, from 0 to 65535"
            )
        image = Image.fromarray((deep >> 8).astype(numpy.uint8))
    if image.mode == "F":
        real = numpy.asarray(image)
        low, high = float(real.min()), float(real.max())
        if not (low >= 0 and high <= 1):  # NaN too
            raise BadImageError(
                path, f"float pixels from {low:g} to {high:g}: save them from 0 to 1, or in 8 or 16 bits"
            )
        image = Image.fromarray((real * 255).round().astype(numpy.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)  # Pillow would copy
