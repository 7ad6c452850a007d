"""Faces from disk with the masks that their owner painted: the training data of XSeg (formats as in `face_files`).

As in DeepFaceLab, faces with polygons are taken if there are any, else those with an applied mask. With
`pretrain: true` all faces are taken, with or without masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from mpt.config.options import DatasetOptions
from mpt.errors import ConfigError, DataError
from mpt.seams import Dataset, DataSpec
from mpt.systems.deepfacelab.data.faces.face_files import (
    FaceFile,
    check_face_types,
    list_faces,
    open_image,
)
from mpt.systems.deepfacelab.data.faces.face_geometry import face_matrix
from mpt.systems.deepfacelab.data.faces.face_pairs import check_settings
from mpt.systems.deepfacelab.data.faces.mask_changes import Labelled, Picture
from mpt.systems.deepfacelab.data.faces.mask_faces import MaskedFaces, describe_masks
from mpt.systems.deepfacelab.data.faces.opencv import opencv

ASSUMED_COUNT = 100
PATHS = ("src", "dst")


class Settings(DatasetOptions):
    src: str
    """Folder or faceset.pak of faces with painted masks."""
    dst: str | None = None
    """Another one. DeepFaceLab trains one XSeg on both people."""
    face_type: Literal["h", "mf", "f", "wf", "head"] = "wf"
    """How much of the head the network sees; larger faces are cut to it. Choose that of the swapping model."""
    pretrain: bool = False
    """Teach the network faces in general: all faces, and their grey pictures instead of masks."""
    hold_out_every: int = Field(10, ge=0)
    """Of that many faces one is held out of training, for evaluation and previews; 0 trains on all, as DeepFaceLab
    does, and evaluates on training faces."""


class PaintedFaces:
    """Faces on disk with their masks, decoded when they are asked for."""

    def __init__(self, files: Sequence[FaceFile], size: int, face_type: str) -> None:
        self.files, self.size, self.face_type = files, size, face_type

    def __len__(self) -> int:
        return len(self.files)

    def load(self, index: int) -> Labelled:
        """Return a face and its mask at the network's size. DataError when the file is damaged."""
        cv2, file = opencv(), self.files[index]
        picture = (
            np.asarray(open_image(file.read(), file.name).convert("RGB"), np.float32)[..., ::-1]
            / 255
        )
        mask = painted(file, picture.shape[:2])
        size = (self.size, self.size)
        if file.landmarks is None or file.kind == self.face_type:
            if picture.shape[:2] != size:
                picture, mask = (
                    cv2.resize(one, size, interpolation=cv2.INTER_LANCZOS4)
                    for one in (picture, mask)
                )
        else:
            matrix = face_matrix(file.landmarks, self.size, self.face_type)
            picture, mask = (
                cv2.warpAffine(one, matrix, size, flags=cv2.INTER_LANCZOS4)
                for one in (picture, mask)
            )
        return Labelled(np.ascontiguousarray(picture), mask)


def painted(file: FaceFile, shape: Sequence[int]) -> Picture:
    """Return the mask of a face's polygons, else its applied one, (h, w); all 0 without either."""
    cv2 = opencv()
    mask = np.zeros(tuple(shape), np.float32)
    if file.mask_path is not None or (file.xseg_mask is not None and not file.polygons):
        data = file.mask_path.read_bytes() if file.mask_path is not None else file.xseg_mask
        assert data is not None
        drawn = (
            np.asarray(open_image(data, f"{file.name}: its mask").convert("L"), np.float32) / 255
        )
        drawn = cv2.resize(drawn, tuple(shape)[::-1], interpolation=cv2.INTER_CUBIC)
        return np.asarray(drawn >= 0.5, np.float32)
    for polygon in file.polygons:
        cv2.fillPoly(mask, [polygon.points.astype(np.int32)], 1 if polygon.includes else 0)
    return mask


def build(settings: Settings, split: str, seed: int) -> Dataset:
    """List the faces and choose those with masks."""
    check_settings(settings.channels, settings.augment)
    if settings.image_size is None:
        raise ConfigError(
            "dataset.image_size is missing and the model has none; write the side in pixels"
        )
    opencv()  # said before training begins
    sides = {
        side: list_faces(Path(place), side)
        for side in PATHS
        if (place := getattr(settings, side)) is not None
    }
    check_face_types(sides, settings.face_type)
    files, labels = choose_labelled([face for faces in sides.values() for face in faces], settings)
    every = settings.hold_out_every
    if every > 1 and len(files) >= every:
        files = [
            file
            for index, file in enumerate(files)
            if (index % every == every - 1) == (split == "test")
        ]
    extra = {"pretrain": settings.pretrain, "face_type": settings.face_type, "labels": labels}
    faces = PaintedFaces(files, settings.image_size, settings.face_type)
    return MaskedFaces(faces, settings.image_size, seed, split == "train", extra)


def choose_labelled(files: Sequence[FaceFile], settings: Settings) -> tuple[list[FaceFile], str]:
    """Return the faces to train on, and a sentence that says which. DataError if no face has a mask."""
    if settings.pretrain:
        return list(files), f"pretraining on {len(files)} faces, without masks"
    drawn = [file for file in files if file.polygons]
    kind = "polygons"
    if not drawn:
        drawn, kind = (
            [file for file in files if file.xseg_mask is not None or file.mask_path],
            "applied masks",
        )
    if not drawn:
        places = " and ".join(place for place in (settings.src, settings.dst) if place)
        raise DataError(
            f"dataset: none of the {len(files)} faces in {places} has a mask; draw polygons in DeepFaceLab's XSeg "
            "editor (data_src XSeg mask - edit), or put masks/NAME.png alongside plain pictures"
        )
    return drawn, f"{len(drawn)} of {len(files)} faces have {kind}"


def assume(settings: Settings) -> DataSpec | None:
    """Return the layout of faces that are not on this machine, so that a plan needs no data."""
    extra: dict[str, Any] = {"pretrain": settings.pretrain, "face_type": settings.face_type}
    return (
        describe_masks(settings.image_size, ASSUMED_COUNT, extra) if settings.image_size else None
    )
