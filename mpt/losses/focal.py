"""Focal loss: cross-entropy that counts samples the less the surer they are right, for sets of few hard samples.

Source: Lin et al., "Focal loss for dense object detection", 2017, with gamma = 2 and no class weights.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

GAMMA = 2.0


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the batch of (1 - p)^2 * -log p, p being the probability of a sample's label."""
    entropy = functional.cross_entropy(logits, labels, reduction="none")
    return ((1 - (-entropy).exp()) ** GAMMA * entropy).mean()
