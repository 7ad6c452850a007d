"""What a micro-batch counts, with a last one that is smaller, and a sum that is not to be divided."""

from __future__ import annotations

import pytest
import torch

from mpt.engine.step.micro_batches import split, weigh
from mpt.seams import Loss

pytestmark = pytest.mark.tier("fast")


def test_a_smaller_last_part_counts_by_its_samples() -> None:
    batch = {"image": torch.arange(8)}
    assert [(part["image"].tolist(), share) for part, share in split(batch, 3)] == [
        ([0, 1, 2], 0.375),
        ([3, 4, 5], 0.375),
        ([6, 7], 0.25),
    ]
    # a rank's half of 16
    assert [share for _, share in split(batch, 3, whole=16)] == [0.1875, 0.1875, 0.125]


def test_means_are_weighed_and_sums_over_samples_are_not() -> None:
    value = torch.tensor(8.0)
    losses = [Loss("mean", value), Loss("sum", value, "sum")]
    assert [float(one) for one in weigh(losses, 0.25)] == [2, 8]
