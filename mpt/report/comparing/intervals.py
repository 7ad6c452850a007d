"""Spreads of seeds, and confidence intervals of paired differences and ratios, on which the verdicts are based.

Sources: Student's t for differences; Fieller (1954) for a ratio whose denominator is measured with error too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import covariance

from scipy.special import stdtrit

LEVEL = 0.05
"""Error rate of each of the two one-sided tests."""


@dataclass(frozen=True)
class Spread:
    """How far apart the seeds of one mode lie: the scale against which any difference is to be read."""

    count: int
    mean: float
    deviation: float
    """Sample standard deviation; NaN for one seed."""
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Describe the values of one mode over its seeds."""
    if not values:
        return Spread(0, math.nan, math.nan, math.nan, math.nan)
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(covariance(values, values)) if len(values) > 1 else math.nan
    return Spread(len(values), mean, deviation, min(values), max(values))


def difference_interval(
    first: Sequence[float], second: Sequence[float], level: float = LEVEL
) -> tuple[float, float]:
    """Return the interval of the mean of second - first, paired, that misses it at `level` on each side."""
    differences = [after - before for before, after in zip(first, second, strict=True)]
    centre = math.fsum(differences) / len(differences)
    error = math.sqrt(covariance(differences, differences) / len(differences))
    reach = student_quantile(1 - level, len(differences) - 1) * error
    return centre - reach, centre + reach


def fieller_interval(
    first: Sequence[float], second: Sequence[float], level: float = LEVEL
) -> tuple[float, float]:
    """Return the interval of (mean(second) - mean(first)) / |mean(first)|, paired, that misses at `level` a side.

    The ratios r not rejected by a t test of mean(second - r * first) = 0 solve a quadratic (Fieller 1954). Unbounded
    when the baseline's mean is not clearly apart from zero.
    """
    count = len(first)
    mean_first = math.fsum(first) / count
    weight = student_quantile(1 - level, count - 1) ** 2 / count
    # In d = second - first and q = ratio - 1, which keeps equal inputs exactly equal:
    # mean(d - q * first)^2 <= weight * var(d - q * first)
    delta = [after - before for before, after in zip(first, second, strict=True)]
    mean_delta = math.fsum(delta) / count
    square = mean_first**2 - weight * covariance(first, first)
    if square <= 0:
        return -math.inf, math.inf
    half_linear = mean_first * mean_delta - weight * covariance(first, delta)
    constant = mean_delta**2 - weight * covariance(delta, delta)
    root = math.sqrt(max(0.0, half_linear**2 - square * constant))
    ends = (half_linear - root) / square, (half_linear + root) / square
    sign = math.copysign(1.0, mean_first)  # the ratio to a negative mean falls as the metric rises
    return min(sign * ends[0], sign * ends[1]), max(sign * ends[0], sign * ends[1])


def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t."""
    return float(stdtrit(freedom, probability))
