"""How strict each look must be when seeds are added until the verdict is in.

Who looks after every seed and stops at the first verdict is wrong far more often than one look is. So the error rate is
spent over the looks (Lan and DeMets 1983, with their spending function of Pocock's type), and the interval at each look
is as much wider: a repeated confidence interval (Jennison and Turnbull 1989), which holds at all looks at once.

The strictness is found for Student's t itself, not for its large-sample limit, which three seeds are far from. At the
edge of the margin the paired differences are normal around zero whatever their spread, so the t values of all looks
have one joint distribution, which is drawn here from a fixed seed. A ratio's interval (Fieller) inverts the same tests.
"""

from __future__ import annotations

import math
from functools import cache

import numpy
from scipy.special import stdtr

LEVEL = 0.05
"""Error rate on each side over all looks."""
FEWEST = 3
PATHS = 400_000
"""Of the joint distribution: the rate spent at a look is exact to about 2 % of itself."""


@cache
def looks(most: int) -> tuple[int, ...]:
    """Return the numbers of seeds after which is looked: from three, further apart as they grow, up to `most`."""
    found, count = [], FEWEST
    while count < most:
        found.append(count)
        count += max(1, count // 4)
    return (*found, max(most, FEWEST))


def spent(share: float) -> float:
    """Return the error rate that may be spent once a share of the most seeds is there."""
    return LEVEL * math.log1p((math.e - 1) * min(share, 1.0))


@cache
def levels(most: int) -> dict[int, float]:
    """Return look -> the level of one one-sided t test at it, such that all together err at `LEVEL`."""
    numbers = numpy.random.Generator(numpy.random.PCG64(20240229))
    total, squares = numpy.zeros(PATHS), numpy.zeros(PATHS)
    alive = numpy.ones(PATHS, dtype=bool)
    found, before, count = {}, 0.0, 0
    for look in looks(most):
        while count < look:
            draw = numbers.standard_normal(PATHS)
            total += draw
            squares += draw * draw
            count += 1
        variance = (squares - total * total / count) / (count - 1)
        student = total / numpy.sqrt(variance * count)
        now = spent(look / max(most, FEWEST))
        rejected = round((now - before) * PATHS)
        edge = numpy.partition(student[alive], -rejected)[-rejected]
        alive &= student < edge
        found[look] = 1 - float(stdtr(look - 1, edge))
        before = now
    return found
