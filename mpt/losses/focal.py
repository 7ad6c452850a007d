"""Focal loss: cross-entropy that counts samples the less the surer they are right, for sets of few hard samples.

Source: Lin et al., "Focal loss for dense object detection", 2017, with gamma = 2 and no class weights.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from mpt.seams import IGNORED

GAMMA = 2.0


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of (1 - p)^2 * -log p over samples that have a label, p being the label's probability."""
    # 0 for samples that are left out
    entropy = functional.cross_entropy(logits, labels, reduction="none")
    return ((1 - (-entropy).exp()) ** GAMMA * entropy).sum() / (labels != IGNORED).sum()
