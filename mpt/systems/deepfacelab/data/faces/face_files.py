"""Read aligned faces from disk: DeepFaceLab's JPGs with their metadata, its faceset.pak, and plain images with masks.

A JPG's metadata (`face_metadata`) are the face type, 68 landmarks in the picture, and possibly its owner's painting: an
XSeg mask, which is an encoded image, or polygons. A faceset.pak is a version, a pickled list of settings, offsets and
the JPGs one after another; its settings are before the JPGs' own. Without metadata, a folder must hold
`masks/NAME.png` for each image.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mpt.data.pictures.decoding import turn_of
from mpt.errors import DataError
from mpt.foreign.files import LARGEST_PICTURE_BYTES, open_foreign, read_bytes
from mpt.systems.deepfacelab.data.faces.face_geometry import (
    PADDING,
    TYPES,
    Matrix,
    Points,
    face_matrix,
)
from mpt.systems.deepfacelab.data.faces.face_masks import (
    Mask,
    Polygon,
    draw_eyes_mouth,
    draw_hull,
    draw_polygons,
)
from mpt.systems.deepfacelab.data.faces.face_metadata import (
    ENUMERATIONS,
    read_face_type,
    read_landmarks,
    read_mask,
    read_metadata,
    read_numbers,
    read_polygons,
)
from mpt.systems.deepfacelab.data.faces.resampling import cut, resize
from mpt.systems.deepfacelab.data.leras.restricted_pickle import read_pickle

SUFFIXES = (".jpg", ".jpeg", ".png")
MOST_PIXELS = 4096 * 4096
LARGEST_SETTINGS_BYTES = 1 << 28
"""Of a pack: a few kilobytes for each face, and its painted mask."""


@dataclass(frozen=True)
class FaceFile:
    """One face on disk: the place of its bytes, and its metadata. `mask_path` is for plain images."""

    path: Path
    name: str
    offset: int = 0
    length: int | None = None
    face_type: str | None = None
    landmarks: Points | None = None
    xseg_mask: bytes | None = None
    polygons: tuple[Polygon, ...] = ()
    brow_factor: float = 1.0
    mask_path: Path | None = None
    source_filename: str | None = None
    """The frame that the face was cut from."""
    source_landmarks: Points | None = None
    """The landmarks in that frame."""
    source_matrix: Matrix | None = None
    """The map from the frame to the aligned picture."""

    @property
    def kind(self) -> str | None:
        """The face's type as options call it; None for plain images."""
        return None if self.face_type is None else TYPES[self.face_type]

    def read(self) -> bytes:
        """Return the encoded image."""
        if self.length is None:
            return read_encoded(self.path)
        with open_foreign(self.path) as file:
            file.seek(self.offset)
            return file.read(self.length)

    def load_picture(self) -> Tensor:
        """Return RGB in [0, 1], float32 (3, h, w). DataError when the file is damaged."""
        picture = open_image(self.read(), self.name)
        if self.mask_path is not None:
            picture = upright(picture)
        return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).float() / 255

    def load(self, size: int, face_type: str | None = None, rule: str = "painted") -> Tensor:
        """Return RGB, mask and eyes-and-mouth, float32 (5, size, size), cut to a type of face if one is given.

        `rule` says which mask, see `faceset.Settings.mask`. DataError when the file is damaged.
        """
        image = self.load_picture()
        sides = image.shape[-1], image.shape[-2]
        if self.mask_path is not None:
            mask = upright(open_image(read_encoded(self.mask_path), str(self.mask_path))).convert(
                "L"
            )
            mask = mask.resize(sides, Image.Resampling.BILINEAR) if mask.size != sides else mask
            masks = torch.from_numpy(np.array(mask, np.float32))[None] / 255
            masks = torch.cat((masks, torch.zeros_like(masks)))
        else:
            masks = self.draw_masks(sides[0], rule)
        if face_type is None or face_type == self.kind or self.landmarks is None:
            return torch.cat((resize(image, size, "bicubic"), resize(masks, size, "bilinear")))
        matrix = face_matrix(self.landmarks, size, face_type)
        return torch.cat(
            (
                cut(image, matrix, size, "bicubic", "border"),
                cut(masks, matrix, size, "bilinear", "zeros"),
            )
        )

    def draw_masks(self, side: int, rule: str = "painted") -> Tensor:
        """Return the face mask and the eyes-and-mouth region within it, float32 (2, side, side)."""
        assert self.landmarks is not None, "checked when the folder was listed"
        mask = self.draw_face(side, rule)
        regions = draw_eyes_mouth(self.landmarks, side) * (mask != 0)
        return torch.from_numpy(np.stack((mask, regions)))

    def draw_face(self, side: int, rule: str = "painted") -> Mask:
        """Return the face mask by `rule`, float32 (side, side)."""
        assert self.landmarks is not None, "checked when the folder was listed"
        found = self.mask_kind(rule)
        if found == "xseg":
            assert self.xseg_mask is not None
            drawn = open_image(self.xseg_mask, f"{self.name}: its XSeg mask").convert("L")
            painted = torch.from_numpy(np.array(drawn, np.float32))[None] / 255
            return np.asarray(resize(painted, side, "bicubic")[0].clamp(0, 1).numpy())
        if found == "polygons" and any(polygon.includes for polygon in self.polygons):
            return draw_polygons(self.polygons, np.zeros((side, side), np.float32))
        hull = draw_hull(self.landmarks, side, self.brow_factor)
        return draw_polygons(self.polygons, hull) if found == "polygons" else hull

    def mask_kind(self, rule: str) -> str:
        """Return the source of the face mask: file, xseg, polygons or hull."""
        if self.mask_path is not None:
            return "file"
        if rule != "hull" and self.xseg_mask is not None:
            return "xseg"
        return "polygons" if rule == "painted" and self.polygons else "hull"


def list_faces(place: Path, side: str) -> list[FaceFile]:
    """Return the faces in a folder or a faceset.pak, sorted by name; `side` (src or dst) is for messages.

    DataError for an empty folder, faces without metadata and masks, several face types, or damaged files.
    """
    if not place.exists():
        raise DataError(
            f"dataset.{side}: {place} does not exist; name a folder of aligned faces or a faceset.pak"
        )
    if place.is_dir() and (place / "faceset.pak").is_file():
        place = place / "faceset.pak"
    if place.is_file():
        faces = list(read_pak(place))
    else:
        paths = sorted(path for path in place.iterdir() if path.suffix.lower() in SUFFIXES)
        faces = [describe(path) for path in paths]
    if not faces:
        raise DataError(
            f"dataset.{side}: {place} holds no faces; put aligned .jpg or .png images there"
        )
    bare = [face.name for face in faces if face.landmarks is None and face.mask_path is None]
    if bare:
        raise DataError(
            f"dataset.{side}: {len(bare)} of {len(faces)} images in {place} have no DeepFaceLab metadata and no mask, "
            f"the first being {bare[0]}; extract them again, remove them, or put masks/NAME.png beside them"
        )
    return faces


def check_face_types(sides: Mapping[str, Sequence[FaceFile]], wanted: str | None) -> str | None:
    """Return the type of face that all are to be cut to, None for plain images.

    DataError when there are several types and none is wanted, or one that shows less of the head than the wanted one.
    """
    first: dict[str | None, tuple[str, str]] = {}
    for side, faces in sides.items():
        for face in faces:
            first.setdefault(face.kind, (side, face.name))
    if wanted is None and len(first) > 1:
        found = "; ".join(
            f"{kind or 'no type'} ({side}: {name})" for kind, (side, name) in first.items()
        )
        raise DataError(
            f"dataset: faces of several types do not fit one model: {found}; set dataset.face_type to the smallest of "
            "them, or extract all with one type"
        )
    order = list(PADDING)
    for kind, (side, name) in first.items():
        if wanted is not None and kind is not None and order.index(kind) < order.index(wanted):
            raise DataError(
                f"dataset.{side}: {name} is of type {kind}, which shows less of the head than face_type {wanted}; "
                "extract it again with a larger type"
            )
    return wanted or next(iter(first))


def describe(path: Path) -> FaceFile:
    """Return an image file's metadata."""
    mask_path = path.parent / "masks" / f"{path.stem}.png"
    if mask_path.is_file():
        return FaceFile(path, str(path), mask_path=mask_path)
    if path.suffix.lower() == ".png":
        return FaceFile(path, str(path))
    return with_metadata(FaceFile(path, str(path)), read_encoded(path))


def read_encoded(path: Path) -> bytes:
    """Return the bytes of a picture's file. Raises DataError for one that cannot be read, or is none by its size."""
    try:
        return read_bytes(path, LARGEST_PICTURE_BYTES)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}); remove it or extract it again"
        ) from error


def with_metadata(
    face: FaceFile, data: bytes, settings: Mapping[str, Any] | None = None
) -> FaceFile:
    """Return the face with its JPG's metadata, and a pack's settings if there are; unchanged without."""
    found = read_metadata(data, face.name)
    content = found or {}
    for key, value in (settings or {}).items():
        if value is not None:
            content["xseg_mask" if key == "xseg_mask_compressed" else key] = value
    if "landmarks" not in content:
        if found is None:
            return face
        raise DataError(f"{face.name}: its metadata hold no 68 landmarks; extract the face again")
    brow = content.get("eyebrows_expand_mod")
    filename = content.get("source_filename")
    return replace(
        face,
        face_type=read_face_type(content.get("face_type"), face.name),
        landmarks=read_landmarks(content["landmarks"], face.name),
        xseg_mask=read_mask(content.get("xseg_mask"), face.name),
        polygons=read_polygons(content.get("seg_ie_polys"), face.name),
        brow_factor=float(brow) if isinstance(brow, int | float) and 0 < brow < 10 else 1.0,
        source_filename=filename if isinstance(filename, str) else None,
        source_landmarks=read_numbers(content.get("source_landmarks"), (68, 2)),
        source_matrix=read_numbers(content.get("image_to_face_mat"), (2, 3)),
    )


def read_pak(path: Path) -> Iterator[FaceFile]:
    """Yield the faces of a faceset.pak."""
    size = path.stat().st_size
    with open_foreign(path) as file:
        version, length = struct.unpack("<QQ", file.read(16).ljust(16, b"\0"))
        if version != 1:
            raise DataError(
                f"{path}: is a faceset of version {version}; only version 1 is known: pack it again"
            )
        if length > size - 16:
            raise DataError(
                f"{path}: is cut off: {length} bytes of settings are announced, {size - 16} follow; copy it again"
            )
        if length > LARGEST_SETTINGS_BYTES:
            raise DataError(
                f"{path}: announces {length} bytes of settings, which no faceset has; pack it again"
            )
        configs = read_pickle(file.read(length), str(path), DataError, ENUMERATIONS)
        if not isinstance(configs, list) or not all(isinstance(config, dict) for config in configs):
            raise DataError(f"{path}: its settings are no list of faces; pack it again")
        table = file.read(8 * (len(configs) + 1))
        if len(table) != 8 * (len(configs) + 1):
            raise DataError(
                f"{path}: is cut off within its table of {len(configs)} faces; copy it again"
            )
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
            if edges[index + 1] - edges[index] > LARGEST_PICTURE_BYTES:
                raise DataError(
                    f"{path}: face {index} of {len(configs)} is larger than any picture; pack it again"
                )
            file.seek(edges[index])
            data = file.read(edges[index + 1] - edges[index])
            yield with_metadata(FaceFile(path, name, edges[index], len(data)), data, config)


def upright(picture: Image.Image) -> Image.Image:
    """Return a plain picture turned as its EXIF orientation says, which painting programs show and keep masks of."""
    turn = turn_of(picture)
    return picture if turn is None else picture.transpose(turn)


def open_image(data: bytes, name: str, most_pixels: int = MOST_PIXELS) -> Image.Image:
    """Decode an image; DataError when it is damaged, cut off, or has more pixels than that.

    It stays as stored, whatever its EXIF orientation: DeepFaceLab reads faces and frames so, and landmarks are in
    these pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(data))
        if picture.width * picture.height > most_pixels:
            raise DataError(
                f"{name}: has {picture.width}x{picture.height} pixels; at most {most_pixels} are read"
            )
        picture.load()
    except (
        OSError,
        ValueError,
        SyntaxError,
        struct.error,
        Image.DecompressionBombError,
        Warning,
    ) as error:
        raise DataError(
            f"{name}: cannot be decoded ({error}); remove it or extract it again"
        ) from error
    return picture
