"""The area under the ROC curve of each class against all others, as a mean over classes.

Computed by torchmetrics (extra `metrics`).
"""

from __future__ import annotations

from torch import Tensor

from mpt.metrics.shared.torchmetrics_call import of_torchmetrics

function = of_torchmetrics("multiclass_auroc")


def measure(logits: Tensor, labels: Tensor) -> float:
    """Return the area, from 0 to 1, classes without test images apart."""
    return function(logits.float().softmax(1), labels)
