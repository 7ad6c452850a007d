"""The mean over classes of recall: of the images of a class, the share that is found.

Computed by torchmetrics (extra `metrics`).
"""

from __future__ import annotations

from torch import Tensor

from mpt.metrics.shared.torchmetrics_call import of_torchmetrics

function = of_torchmetrics("multiclass_recall")


def measure(logits: Tensor, labels: Tensor) -> float:
    """Return the recall, from 0 to 1, classes without test images apart."""
    return function(logits, labels)
