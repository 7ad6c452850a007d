"""Which frames to make: the times of an output between the frames of an input.

The output lasts as long as the input, or `slow` times as long, so that sound stays with it: the last frame is shown as
long as it was. Between two input frames lie either `factor` output frames, evenly, whatever the time between the two;
or those that an even rate puts there. Times are fractions, so a frame that is in the input is never made anew by
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

HIGHEST_FACTOR = 64


@dataclass(frozen=True)
class Shown:
    """One output frame: where it lies between two input frames (0 up to 1), and when it is shown, in seconds."""

    moment: Fraction
    seconds: Fraction


@dataclass(frozen=True)
class Pace:
    """How many output frames there are: `factor` for each input frame, or `rate` per second."""

    factor: int = 2
    rate: Fraction | None = None
    slow: Fraction = Fraction(1)
    """How many times as long the output lasts."""

    def between(self, start: Fraction, end: Fraction) -> tuple[Shown, ...]:
        """Return the output frames from an input frame's time up to, but without, the next one's, in seconds."""
        start, end = start * self.slow, end * self.slow
        if end <= start:
            return ()  # two frames at one time: the first is never seen
        if self.rate is None:
            moments = [Fraction(number, self.factor) for number in range(self.factor)]
            return tuple(Shown(moment, start + moment * (end - start)) for moment in moments)
        first, beyond = math.ceil(start * self.rate), math.ceil(end * self.rate)
        times = [number / self.rate for number in range(first, beyond)]
        return tuple(Shown((time - start) / (end - start), time) for time in times)

    def over(self, edges: Sequence[Fraction]) -> tuple[Shown, ...]:
        """Return the output frames over one or more intervals between input frames, with moments over all of them."""
        whole = (edges[-1] - edges[0]) * self.slow
        return tuple(
            Shown((one.seconds - edges[0] * self.slow) / whole, one.seconds)
            for start, end in pairwise(edges)
            for one in self.between(start, end)
        )

    def most_between(self, longest: Fraction, intervals: int = 1) -> int:
        """Return how many frames are made at most over some intervals of the input, each at most `longest` seconds."""
        if self.rate is None:
            return intervals * self.factor - 1
        ratio = self.rate * longest * self.slow * intervals
        return math.ceil(ratio) - (ratio.denominator == 1)
