"""One image file in: checked before it is decoded, and named when it is bad.

The size is read from the header first, so that a small file that unpacks to gigabytes is refused before anything is
allocated. Only plain raster formats are opened; Pillow would otherwise also hand files to outside programs (EPS). A
picture comes out upright, turned as its EXIF orientation says: viewers and annotation tools show it so, and its boxes
are of that picture.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal

import numpy
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from mpt.errors import DataError
from mpt.foreign.files import LARGEST_PICTURE_BYTES, UnfitFileError, open_foreign

Fit = Literal["crop", "letterbox", "stretch"]
"""How a picture of other proportions is brought to a size: the largest centred part of it; all of it between black
bars; all of it, distorted."""
Box = tuple[int, int, int, int]
"""A part of a picture in pixels: left, top, right, bottom, the last two outside of it."""
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""As torchvision's ImageFolder."""
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> the turn that makes the picture upright (EXIF 2.32, 4.6.4). Pillow turns counter-clockwise."""
SIDEWAYS = tuple(TURNS[orientation] for orientation in (5, 6, 7, 8))
"""Those that exchange width and height."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MOST_PIXEL_BYTES = 16
"""A pixel in a file that is not compressed: four channels of 32 bits."""
REDUCING_GAP = 2
"""How much larger than wanted, in width and height, a picture is at least decoded: the rest is resized well."""
DECODER_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    struct.error,
    zlib.error,
)
"""Errors of Pillow's decoders on damaged files, in addition to Image.DecompressionBombError."""


class BadImageError(DataError):
    """An image file that cannot or may not be decoded. `reason` says why, without the path."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path}: {reason}. Replace or remove the file, or set dataset.on_bad_image=skip to train without it"
        )
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple[type[BadImageError], tuple[Path, str]]:
        return type(self), (self.path, self.reason)


@contextlib.contextmanager
def failures_as_bad_image(path: Path, max_pixels: int) -> Iterator[None]:
    """Raise BadImageError for whatever a picture file makes Pillow or the reader raise in the block."""
    try:
        with warnings.catch_warnings():
            # Pillow's own warnings about large, odd or damaged files: the limit here is max_pixels, damage raises.
            warnings.simplefilter("ignore")
            yield
    except BadImageError:
        raise
    except Image.DecompressionBombError as error:
        raise BadImageError(path, f"more pixels than dataset.max_pixels={max_pixels}") from error
    except FileNotFoundError as error:
        raise BadImageError(path, "the file is gone") from error
    except UnfitFileError as error:
        raise BadImageError(path, str(error.strerror)) from error
    except UnidentifiedImageError as error:
        raise BadImageError(
            path, "not an image of a known kind (jpg, png, ppm, bmp, tif, webp)"
        ) from error
    except DECODER_ERRORS as error:
        raise BadImageError(path, f"cannot be decoded ({error})") from error


def check_pixels(path: Path, image: Image.Image, max_pixels: int) -> None:
    """Raise BadImageError for a picture of more pixels than allowed, before it is decoded."""
    if image.width * image.height > max_pixels:
        raise BadImageError(
            path,
            f"{image.width} x {image.height} pixels are more than dataset.max_pixels={max_pixels}",
        )


def decode_bytes(
    path: Path,
    channels: int,
    size: tuple[int, int] | None,
    max_pixels: int,
    fit: Fit = "crop",
    *,
    share: float = 1.0,
    reduces: bool = False,
    choose_cut: Callable[[int, int], Box] | None = None,
) -> Tensor:
    """Return an image file as uint8 (channels, h, w). Raises BadImageError.

    With a `size` (height, width) it is brought to these proportions as `fit` says and resized (bilinear, antialiased),
    of a cut one the middle `share` of its sides alone; without, it keeps its own, that of the upright picture. If it
    `reduces`, a JPEG of more than twice the size is decoded smaller first, and one that is decoded whole by simplejpeg,
    if that is installed: to the same pixels, in three quarters of the time. `choose_cut` is asked for the only part to
    return, given the upright picture's width and height; its channels stay last in memory.
    """
    most_bytes = max(LARGEST_PICTURE_BYTES, MOST_PIXEL_BYTES * max_pixels)
    with (
        failures_as_bad_image(path, max_pixels),
        open_foreign(path, most_bytes) as file,
        Image.open(file, formats=FORMATS) as image,
    ):
        width, height = image.size
        check_pixels(path, image, max_pixels)
        turn = turn_of(image)
        if reduces and size is not None:
            reduce_while_decoding(image, size if turn in SIDEWAYS else size[::-1], fit)
        stored = decoded_faster(file, image) if reduces and image.size == (width, height) else image
        picture = convert_mode(path, stored, MODES[channels])
        if turn is not None:
            picture = picture.transpose(turn)
        if choose_cut is not None:
            picture = picture.crop(choose_cut(*picture.size))
        if size is not None and (picture.size != size[::-1] or share < 1):
            picture = fitted(picture, size[::-1], fit, share)
        pixels = numpy.array(picture, dtype=numpy.uint8)
    tensor = torch.from_numpy(pixels)
    if tensor.dim() == 2:
        return tensor[None]
    planes = tensor.permute(2, 0, 1)
    return planes.contiguous() if choose_cut is None else planes


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """Return the transpose that makes an opened picture upright; None if it is, or if its EXIF data cannot be read.

    Pillow itself turns a TIFF when it is loaded, and its size is the turned one's from the start.
    """
    if image.format == "TIFF":
        return None
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except (*DECODER_ERRORS, TypeError):
        return None
    return TURNS.get(orientation) if isinstance(orientation, int) else None


def upright_size(path: Path) -> tuple[int, int]:
    """Return the width and the height of a picture as `decode_bytes` gives it. Raises BadImageError.

    From the header; a PNG is decoded only if something follows its pixels, which may be the EXIF data.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with open_foreign(path) as file, Image.open(file, formats=FORMATS) as image:
                width, height = image.size
                if image.format == "PNG" and "exif" not in image.info and ends_with_pixels(file):
                    return width, height
                return (height, width) if turn_of(image) in SIDEWAYS else (width, height)
    except UnfitFileError as error:
        raise BadImageError(path, str(error.strerror)) from error
    except (*DECODER_ERRORS, Image.DecompressionBombError) as error:
        raise BadImageError(path, f"not a picture that can be read ({error})") from error


def ends_with_pixels(file: BinaryIO) -> bool:
    """Return whether a PNG has nothing but its end after its pixels, by its chunks' headers."""
    file.seek(len(PNG_SIGNATURE))
    last = b""
    while len(header := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", header)
        if kind == b"IEND":
            break
        last = kind
        file.seek(length + 4, os.SEEK_CUR)  # its content and its checksum
    return last == b"IDAT"


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
    """Return a JPEG as it was opened, or decoded by simplejpeg; Pillow takes those that it refuses."""
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
    """Return simplejpeg's decoder of a file's bytes to RGB, None if it is not installed (extra `jpeg`)."""
    try:
        from simplejpeg import decode_jpeg
    except ImportError:
        return None
    decoder: Callable[[bytes], NDArray[numpy.uint8]] = decode_jpeg
    return decoder


def fitted(
    picture: Image.Image, size: tuple[int, int], fit: Fit, share: float = 1.0
) -> Image.Image:
    """Return a picture in another size (width, height), of a cut one its middle `share` alone."""
    method = Image.Resampling.BILINEAR
    if fit == "letterbox":
        return ImageOps.pad(picture, size, method=method, color=0)
    if fit == "stretch":
        return picture.resize(size, method)
    return ImageOps.fit(picture, size, method=method, bleed=(1 - share) / 2)


def convert_mode(path: Path, image: Image.Image, mode: str) -> Image.Image:
    """Return the picture in 8 bits as `L`, `RGB` or `RGBA`. Raises BadImageError for a range that no image has.

    Pillow's own conversion would clip pictures of more than 8 bits at 255, and round fractions to 0 and 1.
    """
    if image.mode.startswith("I"):
        deep = numpy.asarray(image).astype(numpy.int64)
        if image.mode == "I" and not (deep.min() >= 0 and deep.max() <= 65535):
            raise BadImageError(
                path,
                f"32-bit pixels from {deep.min()} to {deep.max()}: save them in 16 bits, from 0 to 65535",
            )
        image = Image.fromarray((deep >> 8).astype(numpy.uint8))
    if image.mode == "F":
        real = numpy.asarray(image)
        low, high = float(real.min()), float(real.max())
        if not (low >= 0 and high <= 1):  # NaN too
            raise BadImageError(
                path,
                f"float pixels from {low:g} to {high:g}: save them from 0 to 1, or in 8 or 16 bits",
            )
        image = Image.fromarray((real * 255).round().astype(numpy.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)  # Pillow would copy
