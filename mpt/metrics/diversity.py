"""How varied generated samples are beside real ones: the ratio of the spreads of their features.

A generator that makes one good picture over and over has a Frechet distance that need not look alarming; its diversity
does: near 1 is as varied as the data, near 0 is collapse.
"""

from __future__ import annotations

from torch import Tensor


def relative_diversity(real_nd: Tensor, fake_nd: Tensor) -> float:
    """Return the root mean square distance of fake features to their mean, divided by that of the real ones."""
    real, fake = (features.double() - features.double().mean(0) for features in (real_nd, fake_nd))
    return float((fake.square().sum(1).mean() / real.square().sum(1).mean().clamp_min(1e-12)).sqrt())
