"""The mean over classes of precision: of the images taken for a class, the share that is of it.

Computed by torchmetrics (extra `metrics`).
"""

from __future__ import annotations

from torch import Tensor

from mpt.metrics.shared.torchmetrics_call import of_torchmetrics

function = of_torchmetrics("multiclass_precision")


def measure(logits: Tensor, labels: Tensor) -> float:
    """Return the precision, from 0 to 1, classes without test images apart."""
    return function(logits, labels)
