"""The Frechet distance between two sets of features, each taken as a Gaussian.

    d = |mean_a - mean_b|^2 + trace(cov_a + cov_b - 2 (cov_a^1/2 cov_b cov_a^1/2)^1/2)

Zero for equal means and covariances, growing as the sets part. Everything is float64: the trace is a small difference
of large sums. The root is taken by two symmetric eigendecompositions rather than `sqrtm` of the unsymmetric product,
which turns complex by rounding when a covariance is singular (a collapsed generator). The distance is biased upwards
for few samples, so compare figures taken with the same number of them.

The number's meaning depends on the feature space: see `digit_features` and `random_conv_features`. Neither is
Inception, so no figure here is a published FID.

Sources: Dowson & Landau, "The Frechet distance between multivariate normal distributions", 1982; Heusel et al., "GANs
Trained by a Two Time-Scale Update Rule Converge to a Local Nash Equilibrium", 2017.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mpt.metrics.shared.float64 import in_float64


def frechet_distance(real_features: Tensor, fake_features: Tensor) -> float:
    """Return the distance between features (n, d) and (m, d), n and m at least 2. Infinite when any is not finite."""
    return distance_of_moments(moments(real_features), moments(fake_features))


def too_few(real_features: Tensor, fake_features: Tensor) -> str | None:
    """Return a warning if a covariance of the features (n, d), (m, d) cannot have full rank, else None."""
    (real, size), fake = real_features.shape, len(fake_features)
    if min(real, fake) > size:
        return None
    return (
        f"the Frechet distance rests on {real} test images and {fake} samples, in {size} dimensions: it is far "
        "too high, and comparable only with figures of as many of either. Use more than that of both"
    )


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (d,) and the sample covariance (d, d) of features (n, d), in float64."""
    if len(features) < 2:
        raise ValueError(f"a covariance needs two samples at least, got {len(features)}")
    features = in_float64(features)
    mean = features.mean(0)
    centred = features - mean
    return mean, centred.T @ centred / (len(features) - 1)


def distance_of_moments(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    """Return the distance between two Gaussians, each a mean (d,) and a covariance (d, d) in float64."""
    (mean_a, covariance_a), (mean_b, covariance_b) = one, other
    difference = (mean_a - mean_b).square().sum() + covariance_a.trace() + covariance_b.trace()
    if not math.isfinite(difference.item()):
        return math.inf
    values, vectors = torch.linalg.eigh(covariance_a)
    root_a = vectors * values.clamp_min(0).sqrt() @ vectors.T
    overlap = torch.linalg.eigvalsh(root_a @ covariance_b @ root_a).clamp_min(0).sqrt().sum()
    return max(0.0, float(difference - 2 * overlap))
