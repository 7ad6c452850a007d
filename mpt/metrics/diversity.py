"""How varied a generator's output is beside the real data: the spread of its features over theirs.

About 1 for a generator that covers the data, towards 0 when it repeats itself (mode collapse), above 1 when it
scatters. It says nothing about whether the images look right; read it next to the Frechet distance.
"""

from __future__ import annotations

import math

from torch import Tensor


def diversity_ratio(real_features: Tensor, fake_features: Tensor) -> float:
    """Return the root of total feature variance of fake (m, d) over real (n, d). NaN when the real do not vary."""
    real = real_features.double().var(0).sum().item()
    fake = fake_features.double().var(0).sum().item()
    return math.sqrt(fake / real) if real > 0 else math.nan
