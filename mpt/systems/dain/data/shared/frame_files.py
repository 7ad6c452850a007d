"""Frames as numbered files of one folder: in order, of one size, without gaps, each mistake named.

Memory holds no frames: they are decoded when asked for. A file's number is the last run of digits in its name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from mpt.data.pictures.decoding import EXTENSIONS, BadImageError, decode_bytes, upright_size
from mpt.errors import DataError

MAX_PIXELS = 100_000_000


def read_picture(path: Path) -> Tensor:
    """Return a picture as uint8 RGB (3, h, w). Raises DataError."""
    return decode_bytes(path, 3, None, MAX_PIXELS)


def picture_size(path: Path) -> tuple[int, int]:
    """Return height and width of the upright picture, from a file's header. Raises DataError."""
    try:
        width, height = upright_size(path)
    except BadImageError as error:
        raise DataError(f"{path}: {error.reason}") from error
    return height, width


def number_of(path: Path) -> int | None:
    """Return the last number in a file's name."""
    found = re.findall(r"\d+", path.stem)
    return int(found[-1]) if found else None


def list_frames(folder: Path, allow_gaps: bool | None = None) -> list[Path]:
    """Return a folder's frames in order. Raises DataError for none, one, two of a number, and for gaps.

    Gaps are refused unless `allow_gaps` is true; None says that the caller has no option `--allow-gaps` to point to.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder of frames")
    files = [
        path
        for path in folder.iterdir()
        if path.suffix.lower() in EXTENSIONS and not path.name.startswith(".")
    ]
    if not files:
        raise DataError(f"{folder}: no pictures; looked for {', '.join(EXTENSIONS)}")
    if len(files) == 1:
        raise DataError(
            f"{folder}: one picture, {files[0].name}; two or more are needed to interpolate between"
        )
    numbered = [(number, path) for path in files if (number := number_of(path)) is not None]
    if len(numbered) < len(files):
        return sorted(files)
    numbered.sort(key=lambda pair: (pair[0], pair[1].name))
    for (number, path), (following, other) in pairwise(numbered):
        if number == following:
            raise DataError(
                f"{folder}: {path.name} and {other.name} have the same number; keep one of them"
            )
        if following != number + 1 and not allow_gaps:
            way_out = (
                ""
                if allow_gaps is None
                else ", or take them as consecutive frames with --allow-gaps"
            )
            raise DataError(
                f"{folder}: the numbering goes from {path.name} to {other.name}: {following - number - 1} missing. "
                f"Add the missing ones, renumber the files{way_out}"
            )
    return [path for _, path in numbered]


def check_sizes(files: Sequence[Path]) -> tuple[int, int]:
    """Return the frames' common height and width. Raises DataError naming the first that differs."""
    wanted = picture_size(files[0])
    for path in files[1:]:
        found = picture_size(path)
        if found != wanted:
            raise DataError(
                f"{path}: {found[1]} x {found[0]} pixels, but {files[0].name} has {wanted[1]} x {wanted[0]}; all "
                "frames of a sequence have one size"
            )
    return wanted
