"""The loss against the published programs' numbers, and what it promises beside them."""

import pytest
import torch
from torch import Tensor

from mpt.systems.yolofuse.losses.shared.detection import (
    Choice,
    DetectionSums,
    assign,
    ciou,
    detection_sums,
)
from mpt.systems.yolofuse.nn.layers.yolo_head import decode, places
from tests.systems.yolofuse.published import read_arrays

STRIDES = (8, 16, 32)
GAINS = (7.5, 0.5, 1.5)
VERSIONS = [("v83", 0.0), ("v84", 16.0)]


class Case:
    """One batch of four pictures with 0, 1, 5 and 12 boxes."""

    def __init__(self) -> None:
        self.arrays = read_arrays("loss.npz")
        self.raw = [torch.from_numpy(self.arrays[f"raw{n}"]) for n in range(3)]
        self.boxes = torch.from_numpy(self.arrays["padded_boxes"])
        self.valid = torch.from_numpy(self.arrays["padded_valid"])
        targets = torch.from_numpy(self.arrays["targets"])
        self.classes = torch.zeros(self.valid.shape, dtype=torch.long)
        for picture in range(4):
            own = targets[targets[:, 0] == picture, 1].long()
            self.classes[picture, : len(own)] = own


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def total(sums: DetectionSums, batch: int) -> Tensor:
    weighted = sum(gain * value for gain, value in zip(GAINS, sums[:3], strict=True))
    return weighted / sums.normaliser.clamp(min=1) * batch


@pytest.mark.parametrize(("version", "least_side"), VERSIONS)
def test_losses_and_gradients_equal_the_published_ones(
    case: Case, version: str, least_side: float
) -> None:
    raw = [level.clone().requires_grad_() for level in case.raw]
    sums = detection_sums(
        raw, STRIDES, case.boxes, case.classes, case.valid, Choice(least_side=least_side)
    )
    loss = total(sums, 4)
    loss.backward()
    items = [
        gain * float(value.detach() / sums.normaliser)
        for gain, value in zip(GAINS, sums[:3], strict=True)
    ]
    assert items == pytest.approx(case.arrays[f"{version}_items"].tolist(), rel=2e-6)
    assert float(loss.detach()) == pytest.approx(float(case.arrays[f"{version}_total"]), rel=2e-6)
    assert float(sums.normaliser) == pytest.approx(
        float(case.arrays[f"{version}_target_scores_sum"]), rel=1e-6
    )
    for number, level in enumerate(raw):
        expected = torch.from_numpy(case.arrays[f"{version}_grad{number}"])
        torch.testing.assert_close(level.grad, expected, rtol=1e-4, atol=5e-7)


@pytest.mark.parametrize(("version", "least_side"), VERSIONS)
def test_the_assignment_equals_the_published_one(
    case: Case, version: str, least_side: float
) -> None:
    centres, steps = places(case.raw, STRIDES)
    boxes, scores = decode(case.raw, STRIDES)
    found = assign(
        scores,
        boxes,
        centres * steps,
        case.boxes,
        case.classes,
        case.valid,
        Choice(least_side=least_side),
    )
    arrays = {
        name: torch.from_numpy(case.arrays[f"{version}_{name}"])
        for name in ("foreground", "matched")
    }
    assert torch.equal(found.foreground_bp, arrays["foreground"])
    matched = torch.where(found.foreground_bp, found.matched_bp, -1)
    assert torch.equal(matched, arrays["matched"].long())
    scores = torch.from_numpy(case.arrays[f"{version}_target_scores"])
    torch.testing.assert_close(found.scores_bpc, scores, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        found.boxes_bp4, torch.from_numpy(case.arrays[f"{version}_target_boxes"])
    )


def test_a_batch_without_boxes_teaches_the_background_only(case: Case) -> None:
    raw = [level[:2].clone().requires_grad_() for level in case.raw]
    sums = detection_sums(
        raw, STRIDES, case.boxes[:2], case.classes[:2], torch.zeros_like(case.valid[:2])
    )
    loss = total(sums, 2)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(case.arrays["v83_empty_total"]), rel=1e-6)
    assert [float(value.detach()) for value in (sums.box, sums.distance, sums.normaliser)] == [
        0,
        0,
        0,
    ]
    for number, level in enumerate(raw):
        torch.testing.assert_close(
            level.grad, torch.from_numpy(case.arrays[f"empty_grad{number}"]), rtol=1e-5, atol=1e-7
        )


def test_parts_of_a_batch_sum_to_the_whole(case: Case) -> None:
    raw = [level.double() for level in case.raw]
    whole = detection_sums(raw, STRIDES, case.boxes.double(), case.classes, case.valid)
    parts = [
        detection_sums(
            [level[n : n + 1] for level in raw],
            STRIDES,
            case.boxes[n : n + 1].double(),
            case.classes[n : n + 1],
            case.valid[n : n + 1],
        )
        for n in range(4)
    ]
    for total_value, values in zip(whole, zip(*parts, strict=True), strict=True):
        assert float(sum(values)) == pytest.approx(float(total_value), rel=1e-12)


def test_gradients_are_finite_where_a_predicted_box_is_flat_or_exactly_right() -> None:
    raw = [torch.zeros(1, 65, 2, 2)]
    raw[0][:, [0, 16, 32, 48]] = 60.0  # all distances 0: boxes of no size
    raw[0].requires_grad_()
    boxes, valid = torch.tensor([[[2.0, 2.0, 14.0, 14.0]]]), torch.ones(1, 1, dtype=torch.bool)
    sums = detection_sums(raw, (8,), boxes, torch.zeros(1, 1, dtype=torch.long), valid)
    sum(sums[:3]).backward()
    assert torch.isfinite(raw[0].grad).all()
    same = torch.tensor([[1.0, 1.0, 5.0, 9.0]], requires_grad=True)
    ciou(same, same.detach()).sum().backward()
    assert torch.isfinite(same.grad).all()


def test_the_loss_runs_on_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        raw = [torch.zeros(2, 66, side, side, requires_grad=True) for side in (8, 4, 2)]
        boxes, valid = torch.zeros(2, 5, 4), torch.zeros(2, 5, dtype=torch.bool)
        sums = detection_sums(raw, STRIDES, boxes, torch.zeros(2, 5, dtype=torch.long), valid)
        sum(sums[:3]).backward()
