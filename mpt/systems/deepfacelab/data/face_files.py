"""Read aligned faces from disk: DeepFaceLab's JPGs with their metadata, its faceset.pak, and plain images with masks.

DeepFaceLab keeps a pickled dict in each JPG's APP15 segment: the face type, 68 landmarks in the picture, and possibly
a hand-made mask. It is read by `mpt.data.restricted_pickle`, never unpickled. A faceset.pak is a version, a pickled
list of settings, offsets and the JPGs one after another. Without metadata, a folder must hold `masks/NAME.png` for
each image.

The face mask is the stored mask where there is one, else the convex hull of the landmarks with the brows raised; the
eyes and mouth are the hulls of theirs, widened by a 32nd of the side. (DeepFaceLab joins several hulls; the outline is
the same but for the hollow of the cheeks.)
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from mpt.data.restricted_pickle import read_pickle
from mpt.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png")
MOST_PIXELS = 4096 * 4096
METADATA_MARKER = 0xEF
BROWS, RIGHT_EYE, LEFT_EYE, MOUTH = slice(17, 27), slice(36, 42), slice(42, 48), slice(48, 60)


@dataclass(frozen=True)
class FaceFile:
    """One face on disk: where its bytes are, and what its metadata say. `mask_path` is for plain images."""

    path: Path
    name: str
    offset: int = 0
    length: int | None = None
    face_type: str | None = None
    landmarks: np.ndarray[Any, np.dtype[np.float64]] | None = None
    drawn_mask: bytes | None = None
    brow_factor: float = 1.0
    mask_path: Path | None = None

    def read(self) -> bytes:
        """Return the encoded image."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(-1 if self.length is None else self.length)

    def load(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return RGB, mask and eyes-and-mouth, uint8 (5, size, size). DataError when the file is damaged."""
        picture = open_image(self.read(), self.name).convert("RGB")
        side = picture.size
        picture = picture.resize((size, size), Image.Resampling.BICUBIC) if side != (size, size) else picture
        if self.mask_path is not None:
            mask = open_image(self.mask_path.read_bytes(), str(self.mask_path)).convert("L")
            regions = Image.new("L", (size, size))
        else:
            assert self.landmarks is not None, "checked when the folder was listed"
            points = self.landmarks * (size / side[0], size / side[1])
            regions = draw_eyes_mouth(points, size)
            if self.drawn_mask:
                mask = open_image(self.drawn_mask, f"{self.name}: its stored mask").convert("L")
            else:
                mask = draw_hull(raise_brows(points, self.brow_factor), size)
        mask = mask.resize((size, size), Image.Resampling.BILINEAR) if mask.size != (size, size) else mask
        planes = [np.asarray(picture).transpose(2, 0, 1), np.asarray(mask)[None], np.asarray(regions)[None]]
        return np.concatenate(planes)


def list_faces(place: Path, side: str) -> list[FaceFile]:
    """Return the faces in a folder or a faceset.pak, sorted by name; `side` (src or dst) is for messages.

    DataError for an empty folder, faces without metadata and masks, several face types, or damaged files.
    """
    if not place.exists():
        raise DataError(f"dataset.{side}: {place} does not exist; name a folder of aligned faces or a faceset.pak")
    if place.is_dir() and (place / "faceset.pak").is_file():
        place = place / "faceset.pak"
    if place.is_file():
        faces = list(read_pak(place))
    else:
        paths = sorted(path for path in place.iterdir() if path.suffix.lower() in SUFFIXES)
        faces = [describe(path) for path in paths]
    if not faces:
        raise DataError(f"dataset.{side}: {place} holds no faces; put aligned .jpg or .png images there")
    bare = [face.name for face in faces if face.landmarks is None and face.mask_path is None]
    if bare:
        raise DataError(
            f"dataset.{side}: {len(bare)} of {len(faces)} images in {place} have no DeepFaceLab metadata and no mask, "
            f"the first being {bare[0]}; extract them again, remove them, or put masks/NAME.png beside them"
        )
    return faces


def check_face_types(sides: dict[str, list[FaceFile]]) -> str | None:
    """Return the one face type of all faces, None for plain images; DataError when there are several."""
    first: dict[str | None, tuple[str, str]] = {}
    for side, faces in sides.items():
        for face in faces:
            first.setdefault(face.face_type, (side, face.name))
    if len(first) > 1:
        found = "; ".join(f"{kind or 'no type'} ({side}: {name})" for kind, (side, name) in first.items())
        raise DataError(f"dataset: faces of several types do not fit one model: {found}; extract all with one type")
    return next(iter(first))


def describe(path: Path) -> FaceFile:
    """Return what an image file says about itself."""
    mask_path = path.parent / "masks" / f"{path.stem}.png"
    if mask_path.is_file():
        return FaceFile(path, str(path), mask_path=mask_path)
    if path.suffix.lower() == ".png":
        return FaceFile(path, str(path))
    return with_metadata(FaceFile(path, str(path)), path.read_bytes())


def with_metadata(face: FaceFile, data: bytes) -> FaceFile:
    """Return the face with what its JPG's metadata say, unchanged when there are none."""
    segment = find_metadata(data, face.name)
    if segment is None:
        return face
    content = read_pickle(segment, face.name, DataError)
    if not isinstance(content, dict):
        raise DataError(f"{face.name}: its metadata are a {type(content).__name__}, not a dict; extract the face again")
    drawn = content.get("xseg_mask")
    brow = content.get("eyebrows_expand_mod")
    return FaceFile(
        path=face.path,
        name=face.name,
        offset=face.offset,
        length=face.length,
        face_type=str(content.get("face_type") or "full_face"),
        landmarks=read_landmarks(content.get("landmarks"), face.name),
        drawn_mask=drawn if isinstance(drawn, bytes) else None,
        brow_factor=float(brow) if isinstance(brow, int | float) and 0 < brow < 10 else 1.0,
    )


def read_landmarks(value: Any, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return 68 finite points (x, y), or raise DataError."""
    try:
        points = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        points = np.empty(0)
    if points.shape != (68, 2) or not np.isfinite(points).all():
        raise DataError(f"{name}: its metadata hold no 68 landmarks; extract the face again")
    return points


def find_metadata(data: bytes, name: str) -> bytes | None:
    """Return the APP15 segment of a JPG, None where there is none; DataError when the file ends too early."""
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
    raise DataError(f"{name}: the JPG is cut off or damaged at byte {min(position, len(data))}; extract it again")


def read_pak(path: Path) -> Iterator[FaceFile]:
    """Yield the faces of a faceset.pak."""
    size = path.stat().st_size
    with path.open("rb") as file:
        version, length = struct.unpack("<QQ", file.read(16).ljust(16, b"\0"))
        if version != 1:
            raise DataError(f"{path}: is a faceset of version {version}; only version 1 is known: pack it again")
        if length > size - 16:
            raise DataError(
                f"{path}: is cut off: {length} bytes of settings are announced, {size - 16} follow; copy it again"
            )
        configs = read_pickle(file.read(length), str(path), DataError)
        if not isinstance(configs, list) or not all(isinstance(config, dict) for config in configs):
            raise DataError(f"{path}: its settings are no list of faces; pack it again")
        table = file.read(8 * (len(configs) + 1))
        if len(table) != 8 * (len(configs) + 1):
            raise DataError(f"{path}: is cut off within its table of {len(configs)} faces; copy it again")
        offsets = struct.unpack(f"<{len(configs) + 1}Q", table)
        start = 16 + length + len(table)
        # All offsets count from the first face but the last, which counts from the start of the file.
        edges = [start + offset for offset in offsets[:-1]] + [offsets[-1]]
        for index, config in enumerate(configs):
            if not start <= edges[index] < edges[index + 1] <= size:
                raise DataError(
                    f"{path}: is cut off: face {index} of {len(configs)} ends beyond the file; copy it again"
                )
            name = f"{path}: {str(config.get('filename') or index)[:200]}"
            file.seek(edges[index])
            data = file.read(edges[index + 1] - edges[index])
            yield with_metadata(FaceFile(path, name, edges[index], len(data)), data)


def open_image(data: bytes, name: str) -> Image.Image:
    """Decode an image; DataError when it is damaged, cut off, or has more than 16 million pixels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(data))
        if picture.width * picture.height > MOST_PIXELS:
            raise DataError(
                f"{name}: has {picture.width}x{picture.height} pixels; aligned faces have at most 4096x4096"
            )
        picture.load()
    except (OSError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError, Warning) as error:
        raise DataError(f"{name}: cannot be decoded ({error}); remove it or extract it again") from error
    return picture


def draw_hull(points: np.ndarray[Any, Any], size: int) -> Image.Image:
    """Return the filled convex hull of points (x, y) in pixels."""
    canvas = Image.new("L", (size, size))
    fill_hull(ImageDraw.Draw(canvas), points, 0)
    return canvas


def draw_eyes_mouth(points: np.ndarray[Any, Any], size: int) -> Image.Image:
    """Return the soft region of eyes and mouth."""
    canvas = Image.new("L", (size, size))
    for part in (RIGHT_EYE, LEFT_EYE, MOUTH):
        fill_hull(ImageDraw.Draw(canvas), points[part], max(1, size // 64))
    return canvas.filter(ImageFilter.GaussianBlur(size / 64))


def fill_hull(pencil: ImageDraw.ImageDraw, points: np.ndarray[Any, Any], margin: int) -> None:
    """Fill the convex hull of points, widened by a margin in pixels."""
    outline = [(float(x), float(y)) for x, y in convex_hull(points)]
    if len(outline) > 2:
        pencil.polygon(outline, fill=255)
        if margin:  # a thick outline: a maximum filter of this width takes a hundred times as long
            pencil.line([*outline, *outline[:2]], fill=255, width=2 * margin, joint="curve")


def raise_brows(points: np.ndarray[Any, Any], factor: float) -> np.ndarray[Any, Any]:
    """Return landmarks with the brows moved away from the eyes by half the distance between them, times a factor."""
    raised = np.array(points)
    eyes = (points[RIGHT_EYE].mean(axis=0) + points[LEFT_EYE].mean(axis=0)) / 2
    raised[BROWS] += (points[BROWS].mean(axis=0) - eyes) * 0.5 * factor
    return raised


def convex_hull(points: np.ndarray[Any, Any]) -> list[tuple[float, float]]:
    """Return the corners of the convex hull in order (Andrew's monotone chain)."""
    ordered = sorted({(float(x), float(y)) for x, y in points})
    chains: list[list[tuple[float, float]]] = []
    for sequence in (ordered, ordered[::-1]):
        chain: list[tuple[float, float]] = []
        for point in sequence:
            while len(chain) > 1 and _turn(chain[-2], chain[-1], point) <= 0:
                chain.pop()
            chain.append(point)
        chains.append(chain[:-1])
    return chains[0] + chains[1]


def _turn(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
