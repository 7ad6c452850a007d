"""Which frames to make: the times of an output between the frames of an input.

The output lasts as long as the input, so that sound stays with it: n frames at rate r become n R / r frames at rate R,
of which those after the last input frame repeat it. Times are fractions, so a frame that is in the input is never
made anew by rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Pair:
    """The output frames from input frame `index` up to, but without, the next: their times from 0 up to 1."""

    index: int
    times: tuple[Fraction, ...]


def most_between(rate: Fraction, target: Fraction) -> int:
    """Return how many frames lie between two of the input at most, without those that are in it."""
    ratio = target / rate
    return math.ceil(ratio) - (ratio.denominator == 1)


def plan_times(rate: Fraction, target: Fraction, index: int) -> Pair:
    """Return the output frames that begin between input frames `index` and `index + 1`."""
    step = rate / target
    first = -(-index // step)  # the first output frame not before this input frame
    times = []
    number = first
    while number * step < index + 1:
        times.append(number * step - index)
        number += 1
    return Pair(index, tuple(times))
