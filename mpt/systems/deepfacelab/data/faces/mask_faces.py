"""Faces with their masks: the training data of XSeg, whichever files or formulas they come from.

Fields: `face` (3 s s), RGB, and `mask` (1 s s), which is 0 or 1. Training faces are changed (`mask_changes`), test
faces are not. For pretraining the face is only moved and bent, and `mask` is its grey picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from mpt.seams import Batch, Dataset, DataSpec, FieldSpec
from mpt.systems.deepfacelab.data.faces.mask_changes import (
    FACE,
    Labelled,
    change,
    draw_background,
    move,
)
from mpt.systems.deepfacelab.data.faces.opencv import opencv

STREAM = 6
"""The stream of random numbers, alongside those of pairs of faces."""


class LabelledFaces(Protocol):
    """Faces with masks, by number."""

    def __len__(self) -> int: ...

    def load(self, index: int) -> Labelled: ...


class MaskedFaces(Dataset):
    """A data set of faces and their masks. `changes` says that they are training faces."""

    def __init__(
        self,
        faces: LabelledFaces,
        size: int,
        seed: int,
        changes: bool,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.faces, self.size, self.seed, self.changes = faces, size, seed, changes
        self.extra = dict(extra or {})
        self.spec = describe_masks(size, len(faces), self.extra)

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return the samples of these indices as they are in this epoch."""
        chosen = [self.sample(index, epoch) for index in indices]
        pictures = np.stack([one.picture[..., ::-1] for one in chosen]).transpose(0, 3, 1, 2)
        masks = np.stack([one.mask for one in chosen])[:, None]
        return {
            name: torch.from_numpy(np.ascontiguousarray(v))
            for name, v in (("face", pictures), ("mask", masks))
        }

    def sample(self, index: int, epoch: int) -> Labelled:
        """Return one sample. All that is random in it depends on (seed, epoch, index)."""
        face = self.faces.load(index)
        if not self.changes:
            mask = (
                grey(face.picture)
                if self.extra.get("pretrain")
                else (face.mask >= 0.5).astype(np.float32)
            )
            return Labelled(face.picture.clip(0, 1), mask)
        key = [self.seed % 2**64, epoch % 2**64]
        numbers = np.random.Generator(
            np.random.Philox(key=key, counter=[0, 0, index % 2**64, STREAM])
        )
        if self.extra.get("pretrain"):
            picture = move(face, numbers, FACE, bends=True)[0].clip(0, 1)
            return Labelled(picture, grey(picture))
        other = (
            self.faces.load(int(numbers.integers(len(self.faces))))
            if draw_background(numbers)
            else None
        )
        return change(face, other, numbers)


def grey(picture: Any) -> Any:
    """Return the brightness of a picture (s, s, 3), (s, s)."""
    return opencv().cvtColor(np.ascontiguousarray(picture, np.float32), opencv().COLOR_BGR2GRAY)


def describe_masks(size: int, count: int, extra: Mapping[str, Any] | None = None) -> DataSpec:
    """Return the layout of faces with masks, with sides of `size` pixels."""
    fields = {
        "face": FieldSpec((3, size, size), torch.float32, "image"),
        "mask": FieldSpec((1, size, size), torch.float32, "mask"),
    }
    return DataSpec(fields, count, extra=dict(extra or {}))
