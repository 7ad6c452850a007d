"""Metadata of aligned faces: DeepFaceLab's pickled dict in a JPG's APP15 segment, read by `restricted_pickle`.

Each value is checked as it is read, and a wrong one is a DataError with the face's name.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from mpt.errors import DataError
from mpt.systems.deepfacelab.data.faces.face_geometry import NUMBERS, TYPES, Points
from mpt.systems.deepfacelab.data.faces.face_masks import Polygon
from mpt.systems.deepfacelab.data.leras.restricted_pickle import read_pickle

MOST_COORDINATE = 1 << 16
"""The largest coordinate of a landmark or a corner of a polygon: drawing takes as many steps."""
METADATA_MARKER = 0xEF
ENUMERATIONS = (
    ("samplelib.Sample", "SampleType"),
    ("facelib.FaceType", "FaceType"),
    ("facelib", "FaceType"),
    ("core.imagelib.SegIEPolys", "SegIEPolyType"),
)
"""DeepFaceLab's enumerations that occur in metadata; they are read as numbers."""


def read_metadata(data: bytes, name: str) -> dict[str, Any] | None:
    """Return a JPG's metadata, None if it has none. DataError for anything else than a dict."""
    segment = find_metadata(data, name)
    if segment is None:
        return None
    content = read_pickle(segment, name, DataError, ENUMERATIONS)
    if not isinstance(content, dict):
        raise DataError(
            f"{name}: its metadata are a {type(content).__name__}, not a dict; extract the face again"
        )
    return content


def read_face_type(value: Any, name: str) -> str:
    """Return a type's name in metadata, given by name or number; a full face if none is reported."""
    named = NUMBERS.get(value, str(value)) if isinstance(value, int) else str(value or "full_face")
    if named not in TYPES:
        raise DataError(
            f"{name}: its face type is {named[:80]!r}; extract the face again as one of {', '.join(TYPES)}"
        )
    return named


def read_mask(value: Any, name: str) -> bytes | None:
    """Return the encoded image that a painted mask is, whatever it is kept in."""
    if value is None or isinstance(value, bytes):
        return value or None
    if isinstance(value, np.ndarray) and value.dtype == np.uint8:
        return value.tobytes() or None
    raise DataError(
        f"{name}: its XSeg mask is a {type(value).__name__}, not an encoded image; apply the mask again"
    )


def read_polygons(value: Any, name: str) -> tuple[Polygon, ...]:
    """Return the polygons of metadata, those of three points or more.

    The including ones come first, as DeepFaceLab sorts them.
    """
    polys = value.get("polys") if isinstance(value, dict) else value
    if polys is None:
        return ()
    found = []
    for entry in polys if isinstance(polys, list | tuple) else [None]:
        kind, points = (
            (entry.get("type"), entry.get("pts")) if isinstance(entry, dict) else (None, None)
        )
        if isinstance(entry, list | tuple) and len(entry) == 2:
            kind, points = entry
        try:
            array = np.asarray(points, dtype=np.float64).reshape(-1, 2)
        except (TypeError, ValueError):
            array = np.full((1, 2), np.nan)
        if kind not in (0, 1) or not (np.abs(array) <= MOST_COORDINATE).all():
            raise DataError(f"{name}: its polygons (seg_ie_polys) are none; draw them again")
        if len(array) >= 3:
            found.append(Polygon(kind == 1, array))
    return tuple(sorted(found, key=lambda polygon: not polygon.includes))


def read_numbers(value: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any] | None:
    """Return numbers of a shape, none of them beyond `MOST_COORDINATE`; None for anything else."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return array if array.shape == shape and (np.abs(array) <= MOST_COORDINATE).all() else None


def read_landmarks(value: Any, name: str) -> Points:
    """Return 68 finite points (x, y), or raise DataError."""
    points = read_numbers(value, (68, 2))
    if points is None:
        raise DataError(
            f"{name}: its metadata hold no 68 landmarks within {MOST_COORDINATE} pixels; extract the face again"
        )
    return points


def find_metadata(data: bytes, name: str) -> bytes | None:
    """Return the APP15 segment of a JPG, None if there is none; DataError when the file ends too early."""
    if data[:2] != b"\xff\xd8":
        raise DataError(
            f"{name}: is no JPG (it starts with {data[:2].hex() or 'nothing'}); remove it or extract it again"
        )
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:
            position += 1
            continue
        (length,) = struct.unpack(">H", data[position + 2 : position + 4])
        if marker in (0xDA, 0xD9):
            return None
        if marker == METADATA_MARKER and position + 2 + length <= len(data):
            return data[position + 4 : position + 2 + length]
        position += 2 + max(length, 2)
    raise DataError(
        f"{name}: the JPG is cut off or damaged at byte {min(position, len(data))}; extract it again"
    )
