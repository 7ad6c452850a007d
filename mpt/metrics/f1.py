"""The mean over classes of F1, the harmonic mean of precision and recall.

Computed by torchmetrics (extra `metrics`).
"""

from __future__ import annotations

from torch import Tensor

from mpt.metrics.shared.torchmetrics_call import of_torchmetrics

function = of_torchmetrics("multiclass_f1_score")


def measure(logits: Tensor, labels: Tensor) -> float:
    """Return the F1, from 0 to 1, classes without test images apart."""
    return function(logits, labels)
