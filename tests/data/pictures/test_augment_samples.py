"""Images, masks and boxes of one sample are changed alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mpt.data.pictures.augment import preserved_generator
from mpt.data.pictures.augment_samples import SampleAugmentation
from mpt.errors import ConfigError
from mpt.seams import FieldSpec

pytestmark = pytest.mark.tier("fast")


FIELDS = {
    "rgb": FieldSpec((3, 40, 64), torch.float32, "image"),
    "ir": FieldSpec((1, 40, 64), torch.float32, "image"),
    "mask": FieldSpec((1, 40, 64), torch.float32, "mask"),
    "boxes": FieldSpec((4, 4), torch.float32, "boxes"),
    "box_mask": FieldSpec((4,), torch.bool),
    "classes": FieldSpec((4,), torch.int64),
}
BOX = (10, 8, 30, 20)


def sample(fields: dict[str, FieldSpec] = FIELDS) -> dict[str, Tensor]:
    """Return a bright rectangle in every picture, with its box."""
    made = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in fields.items()}
    x1, y1, x2, y2 = BOX
    for name in ("rgb", "ir", "mask"):
        height, width = fields[name].shape[-2:]
        across, down = width / 64, height / 40
        made[name][:, int(y1 * down) : int(y2 * down), int(x1 * across) : int(x2 * across)] = 1
    made["boxes"][0] = torch.tensor(BOX)
    made["box_mask"][0] = True
    made["classes"][0] = 3
    return made


def change(
    entries: list[Any], fields: dict[str, FieldSpec] = FIELDS, index: int = 0
) -> dict[str, Tensor]:
    with preserved_generator():
        return SampleAugmentation(entries, fields, seed=0).apply(sample(fields), 0, index)


def bounds(picture_chw: Tensor) -> list[float]:
    """Return the box around what is bright."""
    rows, columns = (picture_chw[0] > 0.5).nonzero(as_tuple=True)
    return [
        float(columns.min()),
        float(rows.min()),
        float(columns.max()) + 1,
        float(rows.max()) + 1,
    ]


def test_a_flip_moves_every_field_and_leaves_targets_alone() -> None:
    found = change([{"RandomHorizontalFlip": {"p": 1.0}}])
    for name in ("rgb", "ir", "mask"):
        assert bounds(found[name]) == [34, 8, 54, 20]
    assert found["boxes"][0].tolist() == [34, 8, 54, 20]
    assert found["boxes"][1:].abs().sum() == 0
    assert found["box_mask"].tolist() == [True, False, False, False]
    assert found["classes"].tolist() == [3, 0, 0, 0]
    assert {name: type(value) for name, value in found.items()} == dict.fromkeys(FIELDS, Tensor)


@pytest.mark.parametrize("index", range(6))
def test_shifts_and_crops_keep_pictures_masks_and_boxes_together(index: int) -> None:
    entries = [
        {"RandomAffine": {"degrees": 0, "translate": [0.1, 0.1], "scale": [0.8, 1.2]}},
        "RandomHorizontalFlip",
    ]
    found = change([*entries, {"RandomCrop": {"size": [36, 60]}}], index=index)
    assert found["rgb"].shape == (3, 40, 64)
    assert torch.equal(found["rgb"][:1] > 0.5, found["ir"] > 0.5)
    for name in ("rgb", "mask"):
        assert torch.allclose(torch.tensor(bounds(found[name])), found["boxes"][0], atol=2.0)


def test_the_draws_depend_on_seed_epoch_and_index_alone() -> None:
    entries = [{"RandomAffine": {"degrees": 30}}]
    first, again, other = change(entries), change(entries), change(entries, index=1)
    assert all(torch.equal(first[name], again[name]) for name in FIELDS)
    assert not torch.equal(first["rgb"], other["rgb"])


def test_colour_changes_leave_masks_and_boxes_alone() -> None:
    found, before = change([{"ColorJitter": {"brightness": [0.5, 0.5]}}]), sample()
    assert torch.allclose(found["rgb"], before["rgb"] * 0.5)
    assert torch.allclose(found["ir"], before["ir"] * 0.5)
    assert torch.equal(found["mask"], before["mask"])
    assert torch.equal(found["boxes"], before["boxes"])


def test_a_box_that_left_the_picture_leaves_the_mask_too() -> None:
    found = change([{"RandomAffine": {"degrees": 0, "translate": [0.0, 0.0], "scale": [4.0, 4.0]}}])
    assert found["box_mask"].tolist() == [True, False, False, False]
    fields = {**FIELDS, "boxes": FieldSpec((4, 4), torch.float32, "boxes")}
    far = sample(fields)
    far["boxes"][0] = torch.tensor([0.0, 0.0, 4.0, 4.0])
    augmentation = SampleAugmentation([{"CenterCrop": {"size": [20, 32]}}], fields, 0)
    with preserved_generator():
        gone = augmentation.apply(far, 0, 0)
    assert not gone["box_mask"].any()
    assert gone["boxes"].abs().sum() == 0


def test_images_of_two_sizes_are_flipped_together_and_a_crop_of_them_is_refused() -> None:
    fields = {**FIELDS, "ir": FieldSpec((1, 20, 32), torch.float32, "image")}
    found = change([{"RandomHorizontalFlip": {"p": 1.0}}], fields)
    assert bounds(found["ir"]) == [17, 4, 27, 10]
    assert bounds(found["rgb"]) == [34, 8, 54, 20]
    with pytest.raises(
        ConfigError,
        match=r"dataset\.augment: RandomCrop fails on samples of rgb 3x40x64, ir 1x20x32",
    ):
        change([{"RandomCrop": {"size": [16, 16]}}], fields)
