"""The share of samples whose class was named right."""

from __future__ import annotations

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
