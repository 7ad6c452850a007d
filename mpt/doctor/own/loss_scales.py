"""The loss scale of a step that is examined: the largest power of two, from the initial one down, that is finite.

Each scale that is tried is a whole step. Gradients grow with the scale, so that the float32 step tells about where
float16 ends: at its largest number by the largest gradient of what networks multiply in it and add to that, such as
biases, whose gradients are sums over all places. The search begins there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from mpt.doctor.measuring.half_arithmetic import PRODUCTS
from mpt.doctor.measuring.instrument import LARGEST
from mpt.doctor.measuring.measured_step import Step
from mpt.nn.shared.module_places import LOSS

SMALLEST_EXPONENT = -8
"""Of the loss scales that are tried."""
NAMES = frozenset(one.__name__ for one in PRODUCTS) | {"sum"}
"""Operators whose gradients are in float16 in networks."""


def expected_exponent(steps: Iterable[Step]) -> int | None:
    """Return the exponent of the largest loss scale that float16 is expected to hold after a watched float32 step."""
    most = max(
        (
            one.largest
            for step in steps
            for one in step.results
            if one.is_backward and one.operator in NAMES and one.module != LOSS
        ),
        default=0.0,
    )
    return math.floor(math.log2(LARGEST / most)) if most else None


def largest_finite(first: int, highest: int, is_finite: Callable[[int], bool]) -> int | None:
    """Return the largest exponent from `SMALLEST_EXPONENT` to `highest` that is finite, looked for around `first`.

    If one is, so are all smaller ones. Next to `first` it takes two trials.
    """
    place, stride = max(SMALLEST_EXPONENT, min(first, highest)), 1
    low, high = SMALLEST_EXPONENT - 1, highest + 1  # finite up to the one, not from the other on
    while high - low > 1:
        if is_finite(place):
            low = place
        else:
            high = place
        if high > highest:
            place = min(low + stride, highest)
        elif low < SMALLEST_EXPONENT:
            place = max(high - stride, SMALLEST_EXPONENT)
        else:
            place = (low + high) // 2
        stride *= 2
    return low if low >= SMALLEST_EXPONENT else None
