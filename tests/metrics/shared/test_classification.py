"""Who is taken for whom: against counts by hand, and against torchmetrics where it is installed."""

from __future__ import annotations

import pytest
import torch

from mpt import vision_ops
from mpt.metrics.shared.classification import describe

pytestmark = pytest.mark.tier("fast")


CLASSES = ("cat", "dog", "owl")


def logits_for(found: list[int], confidence: float = 0.8) -> torch.Tensor:
    """Return logits whose softmax gives the found class this probability."""
    probabilities = torch.full((len(found), 3), (1 - confidence) / 2)
    probabilities[torch.arange(len(found)), torch.tensor(found)] = confidence
    return probabilities.log()


def test_counts_shares_and_pairs_are_those_by_hand() -> None:
    truth = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    details = describe(logits_for([0, 0, 0, 1, 1, 1, 0, 0]), truth, CLASSES)
    assert details["matrix"] == [[3, 1, 0], [0, 2, 0], [2, 0, 0]]
    cat, dog, owl = details["per_class"]
    assert (cat["precision"], cat["recall"], cat["samples"]) == (pytest.approx(3 / 5), 0.75, 4)
    assert (dog["precision"], dog["recall"]) == (pytest.approx(2 / 3), 1)
    assert (owl["precision"], owl["recall"], owl["f1"]) == (0, 0, 0)
    assert details["pairs"] == [
        {"truth": "owl", "label": "cat", "count": 2},
        {"truth": "cat", "label": "dog", "count": 1},
    ]
    # All answers are 0.8 sure, and 5 of 8 are right.
    assert details["calibration"]["expected_error"] == pytest.approx(0.8 - 5 / 8, abs=1e-5)
    assert [one["samples"] for one in details["calibration"]["bins"]] == [8]


def test_the_errors_that_were_surest_come_first() -> None:
    logits = torch.cat([logits_for([1], 0.5), logits_for([0], 0.99), logits_for([2], 0.9)])
    worst = describe(logits, torch.tensor([0, 0, 1]), CLASSES)["worst"]
    assert [(one["index"], one["label"], one["truth"]) for one in worst] == [
        (2, "owl", "dog"),
        (0, "dog", "cat"),
    ]


def test_many_classes_have_no_matrix_and_none_may_be_missing_from_the_test_set() -> None:
    names = tuple(map(str, range(40)))
    details = describe(torch.eye(40)[:3] * 9, torch.arange(3), names)
    assert details["matrix"] is None
    assert details["macro_f1"] == 1
    assert len(details["per_class"]) == 40


def test_figures_are_torchmetrics_own() -> None:
    vision_ops.import_torchvision()  # which torchmetrics imports
    torchmetrics = pytest.importorskip("torchmetrics", reason="the other side of the comparison")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 7, generator=generator) * 2
    labels = torch.randint(0, 7, (500,), generator=generator)
    details = describe(logits, labels, tuple("abcdefg"))
    functional = torchmetrics.functional.classification
    assert details["macro_f1"] == pytest.approx(
        float(functional.multiclass_f1_score(logits, labels, 7)), abs=1e-6
    )
    expected = functional.multiclass_calibration_error(logits.softmax(1), labels, 7, n_bins=10)
    assert details["calibration"]["expected_error"] == pytest.approx(float(expected), abs=1e-5)
    recall = functional.multiclass_recall(logits, labels, 7, average=None)
    assert [row["recall"] for row in details["per_class"]] == pytest.approx(
        recall.tolist(), abs=1e-6
    )


def test_examples_are_spread_evenly_over_the_set() -> None:
    examples = describe(torch.eye(3).repeat(100, 1), torch.arange(3).repeat(100), CLASSES)[
        "examples"
    ]
    assert [one["index"] for one in examples][:2] == [10, 32]
    assert len({one["index"] for one in examples}) == 14
    assert all(one["label"] == one["truth"] for one in examples)
    assert [
        one["index"] for one in describe(torch.eye(3), torch.arange(3), CLASSES)["examples"]
    ] == [0, 1, 2]
