"""Write aligned faces as DeepFaceLab's extractor does: a JPG of the face's square, with metadata in its APP15 segment.

The square is resampled bilinearly, as in the original, though it names another filter. Bytes of the
picture are its own, since OpenCV encodes it as there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpt.errors import DataError
from mpt.run.process.files import write_atomically
from mpt.systems.deepfacelab.data.faces.face_geometry import (
    Points,
    face_matrix,
    invert,
    transform_points,
)
from mpt.systems.deepfacelab.data.faces.face_metadata import find_metadata
from mpt.systems.deepfacelab.data.faces.opencv import opencv
from mpt.systems.deepfacelab.data.leras.leras_pickle import write_plain

Picture = np.ndarray[Any, np.dtype[Any]]
NAMES = {
    "h": "half_face",
    "mf": "midfull_face",
    "f": "full_face",
    "wf": "whole_face",
    "head": "head",
}
CHECKED = ("h", "mf", "f")
"""Types of which a face is dropped whose square is too large for the box in which it was found."""
MOST_AREA = 4.0
QUALITY = 90
LARGEST_SEGMENT = 65533
MASK_BYTES = 50_000


@dataclass(frozen=True)
class FoundFace:
    """A face in a frame: the box it was found in (left, top, right, bottom), and its landmarks (68, 2)."""

    box: tuple[int, int, int, int]
    landmarks: Points


def fits_its_box(face: FoundFace, size: int, face_type: str) -> bool:
    """Is the face's square not far larger than its box, as it is if landmarks were found wrongly?"""
    if face_type not in CHECKED:
        return True
    corners = np.array([(0, 0), (0, size - 1), (size - 1, size - 1), (size - 1, 0)])
    x, y = transform_points(corners, invert(face_matrix(face.landmarks, size, face_type))).T
    area = abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2
    left, top, right, bottom = face.box
    return bool(area <= MOST_AREA * (right - left) * (bottom - top))


def encode_face(
    frame: Picture, face: FoundFace, source: str, face_type: str, size: int, quality: int = QUALITY
) -> bytes:
    """Return a face of a frame (h, w, 3), B, G, R, uint8, as an aligned JPG with sides of `size` pixels."""
    cv2 = opencv()
    matrix = face_matrix(face.landmarks, size, face_type)
    square = cv2.warpAffine(frame, matrix, (size, size), flags=cv2.INTER_LINEAR)
    done, data = cv2.imencode(".jpg", square, [cv2.IMWRITE_JPEG_QUALITY, quality])
    assert done, "a picture in memory can be encoded"
    metadata = {
        "face_type": NAMES[face_type],
        "landmarks": transform_points(face.landmarks, matrix).tolist(),
        "source_filename": source,
        "source_rect": [int(value) for value in face.box],
        "source_landmarks": np.asarray(face.landmarks, np.float64).tolist(),
        "image_to_face_mat": np.asarray(matrix, np.float64),
    }
    return with_segment(data.tobytes(), metadata, source)


def with_segment(jpg: bytes, metadata: dict[str, Any], name: str) -> bytes:
    """Return a JPG with metadata in the place of those it has. DataError if they are too long for a segment."""
    before = find_metadata(jpg, name)
    if before is not None:
        start = jpg.index(before) - 4
        jpg = jpg[:start] + jpg[start + 4 + len(before) :]
    content = write_plain(metadata)
    if len(content) > LARGEST_SEGMENT:
        raise DataError(
            f"{name}: its metadata have {len(content)} bytes, and a JPG has room for {LARGEST_SEGMENT}"
        )
    place = 2
    if jpg[2:4] == b"\xff\xe0":  # behind JFIF's own segment
        place += 2 + struct.unpack(">H", jpg[4:6])[0]
    return jpg[:place] + b"\xff\xef" + struct.pack(">H", len(content) + 2) + content + jpg[place:]


def encode_mask(mask: Picture) -> bytes:
    """Return a mask (h, w) in [0, 1] as DeepFaceLab keeps an applied one: PNG, or JPG if that is too long."""
    cv2 = opencv()
    levels = (mask.clip(0, 1) * 255).astype(np.uint8)
    data: bytes = cv2.imencode(".png", levels)[1].tobytes()
    quality = 100
    while len(data) > MASK_BYTES and quality >= 0:
        data = cv2.imencode(".jpg", levels, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()
        quality -= 1
    return data


def write_face(path: Path, data: bytes) -> None:
    """Write an encoded face, whole or not at all."""
    write_atomically(path, data, durable=False)
