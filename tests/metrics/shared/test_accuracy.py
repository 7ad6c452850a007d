import pytest
import torch

from mpt.metrics.shared.accuracy import accuracy

pytestmark = pytest.mark.tier("fast")


LOGITS = torch.tensor([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
LABELS = torch.tensor([0, 2, 0, 2])


@pytest.mark.parametrize(("top", "expected"), [(1, 0.25), (2, 0.75), (3, 1.0), (9, 1.0)])
def test_top_k_counts_labels_among_the_k_highest(top, expected):
    assert accuracy(LOGITS, LABELS, top) == expected
