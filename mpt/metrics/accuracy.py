"""The share of samples whose class was named right. Sums stay on the device until `compute`."""

from __future__ import annotations

import torch
from torch import Tensor


def count_correct(logits: Tensor, labels: Tensor, top: int = 1) -> Tensor:
    """Return how many of (b,) labels are among the `top` highest of (b, classes) logits, as a scalar on the device."""
    top = min(top, logits.shape[1])
    if top == 1:
        return (logits.argmax(1) == labels).sum()
    return (logits.topk(top, dim=1).indices == labels[:, None]).any(1).sum()


def accuracy(logits: Tensor, labels: Tensor, top: int = 1) -> float:
    """Return the share of correct answers in one batch, from 0 to 1."""
    return count_correct(logits, labels, top).item() / max(1, len(labels))


class Accuracy:
    """Accuracy over many batches of any sizes."""

    def __init__(self, top: int = 1) -> None:
        self.top, self.count = top, 0
        self.correct: Tensor | None = None

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch. Does not wait for the device."""
        correct = count_correct(logits, labels, self.top).to(torch.int64)
        self.correct = correct if self.correct is None else self.correct + correct
        self.count += len(labels)

    def compute(self) -> float:
        """Return the share of correct answers, from 0 to 1; NaN when nothing was counted."""
        return self.correct.item() / self.count if self.correct is not None and self.count else float("nan")
