"""Drawn faces of two people with the masks that are known of them, to try the training of XSeg on without files."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from mpt.config.options import DatasetOptions
from mpt.seams import Dataset
from mpt.systems.deepfacelab.data.faces.face_pairs import check_settings
from mpt.systems.deepfacelab.data.faces.mask_changes import Labelled
from mpt.systems.deepfacelab.data.faces.mask_faces import MaskedFaces
from mpt.systems.deepfacelab.data.procedural_faces import (
    DESTINATION,
    SOURCE,
    DrawnIdentity,
    draw_expressions,
)


class Settings(DatasetOptions):
    count: int = Field(40, ge=1)
    """Faces of each person to train on."""
    test_count: int = Field(8, ge=1)
    """Faces of each person to test on."""
    pretrain: bool = False
    """Train on the faces' grey pictures instead of their masks."""


class DrawnFaces:
    """The faces of both people, one person after the other."""

    def __init__(self, people: tuple[DrawnIdentity, DrawnIdentity]) -> None:
        self.people = people

    def __len__(self) -> int:
        return sum(map(len, self.people))

    def load(self, index: int) -> Labelled:
        """Return a face and its mask."""
        first = len(self.people[0])
        faces = self.people[index >= first].faces([index % first])
        picture = np.ascontiguousarray(faces.image[0].flip(0).permute(1, 2, 0).numpy())
        return Labelled(picture, faces.mask[0, 0].numpy())


def build(settings: Settings, split: str, seed: int) -> Dataset:
    """Draw both people. Expressions do not depend on the run's seed, so that runs are measured on the same faces."""
    check_settings(settings.channels, settings.augment)
    size, train = settings.image_size or 64, split == "train"
    count = settings.count if train else settings.test_count
    seeds = (1, 2) if train else (11, 12)
    people = [
        DrawnIdentity(who, draw_expressions(count, one), size)
        for who, one in zip((SOURCE, DESTINATION), seeds)
    ]
    return MaskedFaces(
        DrawnFaces((people[0], people[1])), size, seed, train, {"pretrain": settings.pretrain}
    )
