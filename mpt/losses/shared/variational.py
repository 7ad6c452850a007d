"""The two terms of the variational bound, in nats per sample, averaged over the batch.

The reconstruction is computed from logits and summed over pixels in float32: a sum over 784 pixels of order one needs
more digits than float16 has, and `binary_cross_entropy` on probabilities raises under CUDA's autocast. Source: Kingma
and Welling 2014, appendix B.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def bernoulli_reconstruction(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean over samples of the summed negative log-likelihood of `target` in [0, 1] given `logits`."""
    total = F.binary_cross_entropy_with_logits(logits.float(), target.float(), reduction="sum")
    return total / target.shape[0]


def gaussian_divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return the mean over samples of KL(N(mean, variance) || N(0, 1)); both inputs are (n, d)."""
    mean, log_variance = mean.float(), log_variance.float()
    return 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum(dim=1).mean()


def sample_gaussian(mean: Tensor, log_variance: Tensor, noise: Tensor) -> Tensor:
    """Return mean + deviation * noise, in the noise's dtype outside autocast."""
    return mean + (0.5 * log_variance).exp() * noise
