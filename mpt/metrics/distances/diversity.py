"""How varied a generator's output is compared with the real data: the spread of its features over theirs.

About 1 for a generator that covers the data, towards 0 when it repeats itself (mode collapse), above 1 when it
scatters. It says nothing about whether the images look right; read it next to the Frechet distance.
"""

from __future__ import annotations

import math

from torch import Tensor

from mpt.metrics.shared.float64 import in_float64

ROUNDING = 1e-6
"""Features are float32: a spread below this part of their length is their rounding."""


def diversity_ratio(real_features: Tensor, fake_features: Tensor) -> float:
    """Return the root of total feature variance of fake (m, d) over real (n, d). NaN when the real do not vary."""
    real_nd, fake_nd = in_float64(real_features), in_float64(fake_features)
    real, fake = (features.var(0).sum().item() for features in (real_nd, fake_nd))
    noise = ROUNDING**2 * real_nd.square().sum(1).mean().item()
    return math.sqrt(fake / real) if real > noise else math.nan
