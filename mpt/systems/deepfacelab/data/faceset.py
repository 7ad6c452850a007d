"""Faces of two people from disk, in DeepFaceLab's formats or as plain images with masks (see `face_files`).

One face in `hold_out_every` of each person is kept out of training, for the run's evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from mpt.config.options import DatasetOptions
from mpt.errors import ConfigError
from mpt.seams import Dataset, DataSpec
from mpt.systems.deepfacelab.data.faces.face_files import FaceFile, check_face_types, list_faces
from mpt.systems.deepfacelab.data.faces.face_geometry import estimate_yaw
from mpt.systems.deepfacelab.data.faces.face_pairs import (
    NONE,
    Augmentation,
    FacePairs,
    Faces,
    check_settings,
    describe_pairs,
)
from mpt.systems.deepfacelab.data.faces.resampling import resize

ASSUMED_COUNT = 1000

PATHS = ("src", "dst")


class Settings(DatasetOptions):
    src: str
    """Folder or faceset.pak of the person to be drawn."""
    dst: str
    """Folder or faceset.pak of the person to be replaced."""
    random_warp: bool = True
    """Distort the input faces at random; the target stays undistorted."""
    random_transform: bool = True
    """Rotate, scale and shift training faces at random."""
    random_scale: float = Field(0.15, ge=0, lt=1)
    """How far random_transform enlarges faces, or by the inverse makes them smaller; a Quick96 has 0.05."""
    random_src_flip: bool = False
    """Mirror source faces at random, with probability 0.4."""
    random_dst_flip: bool = True
    """Mirror destination faces at random, with probability 0.4."""
    face_type: Literal["h", "mf", "f", "wf", "head"] | None = None
    """How much of the head the model draws; larger faces are cut to it by their landmarks. null takes them as they are,
    all of one type."""
    mask: Literal["painted", "xseg", "hull"] = "painted"
    """painted: the XSeg mask, else the polygons, else the hull of the landmarks. xseg is DeepFaceLab's rule when it
    trains: XSeg mask, else hull. hull looks at no mask."""
    ct_mode: Literal["none", "rct", "lct", "mkl", "idt", "sot"] = "none"
    """Colour transfer from random destination faces to the source's."""
    random_hsv_power: float = Field(0.0, ge=0, le=0.3)
    """Random hue, saturation and brightness of the source's input."""
    uniform_yaw: bool = False
    """Draw faces so that all turns of the head are equally frequent."""
    pretrain: bool = False
    """Both folders hold many people, to teach the model faces in general: no warp, flips, all turns of the head, and
    none of the losses that need two people. `mpt deepfacelab end-pretraining` makes the run that follows."""
    hold_out_every: int = Field(10, ge=0)
    """Of that many faces of each person one is held out of training, for evaluation and previews; 0 trains on all, as
    DeepFaceLab does, and evaluates on training faces."""


class FileIdentity:
    """The faces of one person, decoded when they are asked for."""

    def __init__(
        self, files: Sequence[FaceFile], size: int, face_type: str | None, mask: str
    ) -> None:
        self.files, self.size, self.face_type, self.mask = files, size, face_type, mask

    def __len__(self) -> int:
        return len(self.files)

    def faces(self, indices: Sequence[int]) -> Faces:
        loaded = [self.files[index].load(self.size, self.face_type, self.mask) for index in indices]
        planes = torch.stack(loaded)
        return Faces(planes[:, :3], planes[:, 3:4], planes[:, 4:])

    def picture(self, index: int) -> Tensor:
        """Return a face's whole picture, however much of the head it shows."""
        return resize(self.files[index].load_picture(), self.size, "bilinear")


def build(settings: Settings, split: str, seed: int) -> Dataset:
    """List both people's faces and check that they can be cut to one type."""
    check_settings(settings.channels, settings.augment)
    if settings.image_size is None:
        raise ConfigError(
            "dataset.image_size is missing and the model has none; write the side in pixels"
        )
    sides = {side: list_faces(Path(getattr(settings, side)), side) for side in ("src", "dst")}
    face_type = check_face_types(sides, settings.face_type)
    chosen = {side: choose(files, split, settings.hold_out_every) for side, files in sides.items()}
    people = [
        FileIdentity(files, settings.image_size, face_type, settings.mask)
        for files in chosen.values()
    ]
    extra = describe(settings, face_type)
    extra["masks"] = {
        side: dict(Counter(f.mask_kind(settings.mask) for f in files))
        for side, files in sides.items()
    }
    extra["rules"] = other_rules(settings)
    if split != "train":
        return FacePairs(
            people[0], people[1], settings.image_size, seed, NONE, swaps=None, extra=extra
        )
    yaws = None
    if settings.uniform_yaw or settings.pretrain:
        yaws = {side: [turn_of(file) for file in files] for side, files in chosen.items()}
    augmentation = augment(settings)
    return FacePairs(
        people[0], people[1], settings.image_size, seed, augmentation, None, yaws, extra
    )


def augment(settings: Settings) -> Augmentation:
    """Return how training faces are changed."""
    if settings.pretrain:
        return Augmentation(False, settings.random_transform, 0.4, 0.4, scale=settings.random_scale)
    return Augmentation(
        settings.random_warp,
        settings.random_transform,
        0.4 if settings.random_src_flip else 0.0,
        0.4 if settings.random_dst_flip else 0.0,
        settings.random_hsv_power,
        settings.ct_mode,
        settings.random_scale,
    )


def describe(settings: Settings, face_type: str | None) -> dict[str, Any]:
    """Return the facts about the data, in addition to its layout, that model and task need."""
    warps = settings.random_warp and not settings.pretrain
    return {"random_warp": warps, "pretrain": settings.pretrain, "face_type": face_type}


def other_rules(settings: Settings) -> str | None:
    """Log settings that follow DeepFaceLab and differ from the defaults, as in a run that was converted."""
    rules = []
    if not settings.hold_out_every:
        rules.append(
            "all faces are trained on, and evaluated on (dataset.hold_out_every 0; by default 1 of 10 is held out)"
        )
    if settings.mask == "xseg":
        rules.append(
            "polygons are not looked at (dataset.mask xseg; painted, the default, draws them)"
        )
    return f"as DeepFaceLab: {'; '.join(rules)}" if rules else None


def turn_of(file: FaceFile) -> float:
    """Return how far a face is turned, 0 if it has no landmarks."""
    return 0.0 if file.landmarks is None else estimate_yaw(file.landmarks)


def assume(settings: Settings) -> DataSpec | None:
    """Return the layout of faces that are not on this machine, so that a plan needs no data."""
    extra = describe(settings, settings.face_type)
    return (
        describe_pairs(settings.image_size, ASSUMED_COUNT, extra=extra)
        if settings.image_size
        else None
    )


def choose(files: list[FaceFile], split: str, every: int) -> list[FaceFile]:
    """Return the faces of a split. If none are held out, or there are too few, both splits have them all."""
    if every < 2 or len(files) < every:
        return files
    return [
        file
        for index, file in enumerate(files)
        if (index % every == every - 1) == (split == "test")
    ]
