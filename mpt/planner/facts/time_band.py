"""How far published times of steps lie from planned ones (docs/benchmarks/timm_times.md).

Apart from the time model, which needs torch: commands print the bands, and import none.
"""

from __future__ import annotations

BAND = 0.3
UNCERTAIN_BAND = 0.65
"""Of steps of which `UNCERTAIN_SHARE` is spent in kernels whose published times are spread widely."""
UNCERTAIN_SHARE = 0.05
UNCERTAIN_RANGE = 0.6, 5.0
"""Published over planned time of such steps: no constant meets them."""


def range_of(band: float) -> tuple[float, float]:
    """Return the least and the most that a step may take, in planned ones."""
    return UNCERTAIN_RANGE if band > BAND else (1 - band, 1 + band)
