"""Bright rectangles on noise, in pictures that are not square: up to three boxes each, padded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from mpt.config.options import DatasetOptions
from mpt.data.pictures.seeds import mix
from mpt.seams import Batch, DataSpec, FieldSpec

HEIGHT, WIDTH, MOST = 24, 40, 3


class Settings(DatasetOptions):
    size: int = Field(64, ge=1)
    """Number of training pictures; half as many are for testing."""


class DrawnBoxes:
    """Pictures as bytes, boxes as x1 y1 x2 y2 in pixels with a mask."""

    def __init__(self, size: int, split: int) -> None:
        self.size, self.split = size, split
        fields = {
            "view": FieldSpec((1, HEIGHT, WIDTH), torch.uint8, "image"),
            "boxes": FieldSpec((MOST, 4), torch.float32, "boxes"),
            "box_mask": FieldSpec((MOST,), torch.bool),
        }
        self.spec = DataSpec(fields, size, ("box",))

    def __len__(self) -> int:
        return self.size

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return the pictures of these indices."""
        samples = [self.draw(index) for index in indices]
        return {
            name: torch.stack([sample[name] for sample in samples]) for name in self.spec.fields
        }

    def draw(self, index: int) -> dict[str, torch.Tensor]:
        numbers = torch.Generator().manual_seed(mix(self.split, index))
        view = torch.randint(0, 80, (1, HEIGHT, WIDTH), generator=numbers).byte()
        boxes, count = torch.zeros(MOST, 4), int(torch.randint(1, MOST + 1, (), generator=numbers))
        for box in boxes[:count]:
            x, y = (
                int(torch.randint(0, most - 10, (), generator=numbers)) for most in (WIDTH, HEIGHT)
            )
            box[:] = torch.tensor([x, y, x + 10, y + 8])
            view[:, y : y + 8, x : x + 10] = 255
        return {"view": view, "boxes": boxes, "box_mask": torch.arange(MOST) < count}


def build(settings: Settings, split: str, seed: int) -> DrawnBoxes:
    """Return one split."""
    is_test = split == "test"
    return DrawnBoxes(-(-settings.size // 2) if is_test else settings.size, int(is_test))
