"""Pictures of 16 bits per channel: PNG and TIFF sequences of film and renderers, read through PyAV, written as PNG.

The usual decoder reads such a file as 8 bits without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from mpt.data.video.video import import_av, opened
from mpt.data.video.video_writer import pixels_of
from mpt.errors import DataError, InputOutputError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
HEADER_BYTES = 26
BITS = 24
"""Where a PNG's header says its bits per channel."""
TIFF_BITS = 258
"""The tag of a TIFF with them."""


def header_of(path: Path) -> bytes:
    """Return the beginning of a PNG file; b"" for another one."""
    try:
        with open(path, "rb") as file:
            start = file.read(HEADER_BYTES)
    except OSError:
        return b""
    return start if start.startswith(SIGNATURE) and len(start) == HEADER_BYTES else b""


def is_deep_picture(path: Path) -> bool:
    """Return whether a file is a PNG or a TIFF of 16 bits per channel."""
    if path.suffix.lower() in (".tif", ".tiff"):
        with _opened(path) as image:
            return 16 in tuple(getattr(image, "tag_v2", {}).get(TIFF_BITS, ()))
    header = header_of(path)
    return bool(header) and header[BITS] == 16


def has_alpha(path: Path) -> bool:
    """Return whether a picture has an alpha channel, or a colour that is transparent."""
    with _opened(path) as image:
        return image is not None and ("A" in image.getbands() or "transparency" in image.info)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Image.Image | None]:
    """Yield a picture whose header alone was read; None for a file that is none."""
    try:
        image = Image.open(path)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, ValueError):
        yield None
        return
    with image:
        yield image


def read_deep_picture(path: Path) -> Tensor:
    """Return a picture as int32 RGB (3, h, w) up to 65535. Raises DataError."""
    av = import_av()
    with opened(path) as container:
        try:
            frame = next(container.decode(video=0))
        except (av.error.FFmpegError, StopIteration, IndexError, ValueError) as error:
            raise DataError(f"{path}: cannot be decoded: {error}. Replace the file") from error
        array = frame.to_ndarray(format="rgb48le")
    return torch.from_numpy(array.astype("int32")).permute(2, 0, 1).contiguous()


def write_deep_picture(image_chw: Tensor, path: Path) -> None:
    """Write an int32 image as a PNG of 16 bits. Raises InputOutputError."""
    av = import_av()
    height, width = image_chw.shape[-2:]
    context = av.codec.CodecContext.create("png", "w")
    context.width, context.height, context.pix_fmt = width, height, "rgb48be"
    context.time_base = 1
    frame = av.VideoFrame.from_ndarray(pixels_of(image_chw, deep=True), format="rgb48le").reformat(
        format="rgb48be"
    )
    try:
        packets = [*context.encode(frame), *context.encode(None)]
        path.write_bytes(b"".join(bytes(packet) for packet in packets))
    except (av.error.FFmpegError, OSError) as error:
        raise InputOutputError(f"{path}: cannot be written: {error}") from error
