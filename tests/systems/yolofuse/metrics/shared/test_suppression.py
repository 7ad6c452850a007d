"""Suppression against the published programs and torchvision."""

import json

import pytest
import torch

from mpt import vision_ops
from mpt.systems.yolofuse.metrics.shared.suppression import (
    BLOCK,
    Suppression,
    keep_best,
    suppress,
    suppress_batch,
)
from tests.systems.yolofuse.published import FOLDER, read_arrays

OPTIONS = json.loads((FOLDER / "nms_options.json").read_text())


@pytest.mark.parametrize("number", range(5))
def test_kept_boxes_equal_the_published_ones(number: int) -> None:
    arrays = read_arrays("nms.npz")
    for option, given in enumerate(OPTIONS):
        how = Suppression(
            given["conf"], given["iou"], given["agnostic"], given["multi_label"], given["max_det"]
        )
        for image, rows in enumerate(
            torch.from_numpy(arrays[f"set{number}_predictions"]).transpose(1, 2)
        ):
            middle, half = rows[:, :2], rows[:, 2:4] / 2
            kept = suppress(torch.cat((middle - half, middle + half), 1), rows[:, 4:], how)
            expected = torch.from_numpy(arrays[f"set{number}_option{option}_image{image}"])
            torch.testing.assert_close(kept, expected, rtol=1e-6, atol=1e-4)


def random_boxes(count: int, seed: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=numbers) * 100
    return torch.cat((corner, corner + 5 + 30 * torch.rand(count, 2, generator=numbers)), 1)


def greedy(boxes: torch.Tensor, limit: float) -> list[int]:
    """The definition, one box at a time."""
    from mpt.systems.yolofuse.metrics.shared.suppression import _overlaps

    above = _overlaps(boxes, boxes) > limit
    kept: list[int] = []
    for n in range(len(boxes)):
        if not above[n, kept].any():
            kept.append(n)
    return kept


@pytest.mark.parametrize("count", [0, 1, 300, BLOCK + 700])
def test_blocks_and_rounds_give_the_greedy_choice(count: int) -> None:
    boxes = random_boxes(count, count)
    assert keep_best(boxes, 0.5, 10**6).tolist() == greedy(boxes, 0.5)
    assert keep_best(boxes, 0.5, 7).tolist() == greedy(boxes, 0.5)[:7]


def test_boxes_that_overlap_by_just_the_limit_both_stay_within_a_block_and_across_two() -> None:
    half = torch.tensor([[0.0, 0, 2, 1], [0, 0, 1, 1]])  # an IoU of exactly one half
    assert keep_best(half, 0.5, 10).tolist() == [0, 1]
    assert keep_best(half, 0.49, 10).tolist() == [0]
    others = torch.arange(BLOCK - 1)[:, None] * torch.tensor([[4.0, 0, 4, 0]]) + torch.tensor(
        [[4.0, 0, 5, 1]]
    )
    across = torch.cat((half[:1], others, half[1:]))
    assert len(keep_best(across, 0.5, 10**6)) == BLOCK + 1
    assert len(keep_best(across, 0.49, 10**6)) == BLOCK


def test_kept_boxes_equal_torchvisions() -> None:
    vision_ops.import_torchvision()
    import torchvision

    if not torchvision.extension._has_ops():
        pytest.skip("this torchvision has no compiled operators for this torch")
    boxes = random_boxes(2000, 5)
    scores = torch.linspace(1, 0, len(boxes))
    assert torch.equal(keep_best(boxes, 0.6, 10**6), torchvision.ops.nms(boxes, scores, 0.6))


def test_a_batch_is_padded_with_scores_of_zero() -> None:
    boxes = torch.stack((random_boxes(50, 1), random_boxes(50, 2)))
    scores = torch.rand(2, 50, 3, generator=torch.Generator().manual_seed(3))
    scores[1] = 0
    kept = suppress_batch(boxes, scores, Suppression(limit=20))
    assert kept.shape == (2, 20, 6)
    assert not kept[1].any()
    assert (kept[0, :, 4].diff() <= 0).all()
