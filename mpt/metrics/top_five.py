"""The share of samples whose class is among the five likeliest: the second figure that ImageNet papers give."""

from __future__ import annotations

from torch import Tensor

from mpt.metrics.shared.accuracy import accuracy


def measure(logits: Tensor, labels: Tensor) -> float:
    """Return top-5 accuracy, from 0 to 1; with five classes or fewer it is 1."""
    return accuracy(logits, labels, top=5)
