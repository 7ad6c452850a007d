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


FAST_MEMORY = 1500
"""GB/s, beyond which steps that fill a smaller card leave some of it idle."""
FAST_BAND = 0.5
FAST_RANGE = 0.85, 2.0
"""Measured over planned time on such cards: 68 steps kept an H100 busy for 0.89 to 1.89 times the planned time
(docs/benchmarks/own_steps_limits.md)."""


def range_of(band: float) -> tuple[float, float]:
    """Return the least and the most that a step may take, in planned ones."""
    if band <= BAND:
        return 1 - band, 1 + band
    return FAST_RANGE if band <= FAST_BAND else UNCERTAIN_RANGE
