"""The share of samples whose class was named right."""

from __future__ import annotations

from torch import Tensor

from mpt.seams import IGNORED


def labelled(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits and labels of the samples that have one."""
    is_known = labels != IGNORED
    return logits[is_known], labels[is_known]


def count_correct(logits: Tensor, labels: Tensor, top: int = 1) -> Tensor:
    """Return how many of (b,) labels are among the `top` highest of (b, classes) logits, as a scalar on the device."""
    top = min(top, logits.shape[1])
    if top == 1:
        return (logits.argmax(1) == labels).sum()
    return (logits.topk(top, dim=1).indices == labels[:, None]).any(1).sum()


def accuracy(logits: Tensor, labels: Tensor, top: int = 1) -> float:
    """Return the share of correct answers in one batch, from 0 to 1, of the samples that have a label."""
    logits, labels = labelled(logits, labels)
    return count_correct(logits, labels, top).item() / max(1, len(labels))
