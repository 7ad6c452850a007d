"""A report's details of a classifier's evaluation: who is taken for whom, per class and by confidence.

Confusion counts, precision, recall and F1 per class (F1 is their harmonic mean), calibration in ten bins of confidence
with its expected error (Guo et al., "On calibration of modern neural networks", 2017, equation 3), and the errors that
the network was surest of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BINS, WORST, EXAMPLES, PAIRS, LARGEST_MATRIX = 10, 12, 14, 10, 30


def describe(
    logits: Tensor, labels: Tensor, classes: Sequence[str], numbers: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the details of logits (n, classes or more) against labels (n,) as plain data.

    `worst` names the wrong samples of highest confidence by their number in the test set (`numbers`, by default that of
    their place), `examples` some of all, evenly over the set. The matrix, rows being the truth, is left out above 30
    classes, for which the most confused pairs are more useful.
    """
    numbers = range(len(labels)) if numbers is None else numbers
    count = len(classes)
    probabilities = logits[:, :count].float().softmax(1)
    confidence, found = probabilities.max(1)
    matrix = torch.zeros(count, count, dtype=torch.int64)
    matrix.index_put_((labels.long(), found), torch.ones_like(found), accumulate=True)
    hits, truths, taken = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    precision = hits / taken.clamp_min(1)
    recall = hits / truths.clamp_min(1)
    f1 = 2 * hits / (truths + taken).clamp_min(1)
    wrong = (found != labels).nonzero().flatten()
    surest = wrong[confidence[wrong].argsort(descending=True)][:WORST]

    def sample(index: int) -> dict[str, Any]:
        label, truth = classes[int(found[index])], classes[int(labels[index])]
        return {
            "index": numbers[index],
            "label": label,
            "truth": truth,
            "probability": float(confidence[index]),
        }

    return {
        "classes": list(classes),
        "samples": len(labels),
        "matrix": matrix.tolist() if count <= LARGEST_MATRIX else None,
        "per_class": [
            {
                "name": name,
                "samples": int(n),
                "precision": float(p),
                "recall": float(r),
                "f1": float(f),
            }
            for name, n, p, r, f in zip(classes, truths, precision, recall, f1, strict=True)
        ],
        "macro_f1": float(f1[truths > 0].mean()) if len(labels) else 0.0,
        "pairs": most_confused(matrix, classes),
        "calibration": calibration(confidence, found == labels),
        "worst": [sample(index) for index in surest.tolist()],
        "examples": [sample(index) for index in spread_out(len(labels))],
    }


def spread_out(count: int) -> list[int]:
    """Return the numbers of a few samples, evenly over all: a folder's lie class by class."""
    shown = min(EXAMPLES, count)
    return [(2 * place + 1) * count // (2 * shown) for place in range(shown)]


def most_confused(matrix: Tensor, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the pairs of true and found class that are confused most often."""
    errors = matrix.clone().fill_diagonal_(0).flatten()
    order = errors.argsort(descending=True, stable=True)[:PAIRS].tolist()
    size = len(classes)
    return [
        {
            "truth": classes[place // size],
            "label": classes[place % size],
            "count": int(errors[place]),
        }
        for place in order
        if errors[place] > 0
    ]


def calibration(confidence: Tensor, is_right: Tensor) -> dict[str, Any]:
    """Return the mean confidence and the accuracy in bins of confidence, and the expected calibration error."""
    bins = []
    error = 0.0
    for number in range(BINS):
        low, high = number / BINS, (number + 1) / BINS
        inside = (confidence > low) & (confidence <= high)
        if not bool(inside.any()):
            continue
        mean, accuracy, share = (
            float(confidence[inside].mean()),
            float(is_right[inside].float().mean()),
            float(inside.float().mean()),
        )
        error += share * abs(accuracy - mean)
        bins.append(
            {
                "low": low,
                "high": high,
                "confidence": mean,
                "accuracy": accuracy,
                "samples": int(inside.sum()),
            }
        )
    return {"bins": bins, "expected_error": error}
