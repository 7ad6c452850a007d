"""Whether a plan fits, in three classes, with the chance that a real run does: learnt from published measurements.

`published.json` holds published measurements and the plans of the same runs (`scripts/plans/check_plan.py --save`,
`scripts/plans/chance_table.py --save`). Their ratios, each widened into a normal distribution, give the distribution of
measured over planned memory; each source counts the same, however many runs it has. Planned is what is judged: without
an assumed workspace of cuDNN. Rows whose error has a known cause that no longer applies (`explained`) are left out, and
so are the sources that do not name their way of measuring.

The classes: it fits, with a chance of nine in ten or more; it may fit, by luck or by giving cached memory back to the
driver in every step, which is slower and may fail; it does not fit.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from mpt.planner.answers.plan import InferencePlan, Plan

PUBLISHED = Path(__file__).with_name("published.json")
SURE = 0.9
Class = Literal["fits", "may fit", "does not fit"]


@dataclass(frozen=True)
class Verdict:
    """Whether a plan fits its budget."""

    kind: Class
    chance: float
    """That a run needs no more than the budget; of a plan that empties the cache in every step, that this helps."""

    @property
    def percent(self) -> int:
        """The chance for people, rounded down, so that 90 is only printed of what fits.

        1 to 99: some eighty published runs say nothing of the last of a hundred.
        """
        return min(99, max(1, math.floor(100 * self.chance)))

    @property
    def likely(self) -> str:
        """The chance in words."""
        return f"{self.percent} % likely"

    def __str__(self) -> str:
        return f"{self.kind}, {self.likely} to stay within it" if self.kind != "fits" else "fits"


def judge(plan: Plan | InferencePlan) -> Verdict | None:
    """Return a plan's verdict, None for one without a budget."""
    if plan.budget_bytes is None:
        return None
    easy = chance_of(plan.reserved + plan.context_bytes, plan.budget_bytes)
    if not plan.fits:
        return Verdict("does not fit", easy)
    if plan.tight:
        return Verdict("may fit", chance_of(plan.allocated + plan.context_bytes, plan.budget_bytes))
    return Verdict("fits" if easy >= SURE else "may fit", easy)


def fits_surely(plan: Plan | InferencePlan) -> bool:
    """Return whether a plan is of the class that fits, not of the one that only may."""
    found = judge(plan)
    return found is not None and found.kind == "fits"


def chance_of(planned_bytes: int, budget_bytes: int) -> float:
    """Return the chance that a run stays within a budget for which so much was planned."""
    return share_below(budget_bytes / planned_bytes, published_ratios().values())


def share_below(limit: float, sources: Collection[Sequence[float]]) -> float:
    """Return the share of a distribution of ratios, each widened into a normal one, that lies below a limit.

    Each source counts the same.
    """
    bell = statistics.NormalDist(0, bell_width(tuple(chain.from_iterable(sources))))
    return statistics.fmean(
        statistics.fmean(bell.cdf(limit - ratio) for ratio in ratios) for ratios in sources
    )


@functools.cache
def sure_share() -> float:
    """Return the largest share of a budget, to a thousandth, that may be planned for and still fits."""
    return next(share / 1000 for share in range(999, 0, -1) if chance_of(share, 1000) >= SURE)


@functools.cache
def published_ratios() -> dict[str, list[float]]:
    """Return measured over planned bytes of the published runs, by source."""
    found: dict[str, list[float]] = {}
    for row in json.loads(PUBLISHED.read_text("utf-8")):
        if not row["explained"]:
            found.setdefault(row["source"], []).append(row["measured_mib"] / row["planned_mib"])
    return found


@functools.lru_cache(64)
def bell_width(ratios: tuple[float, ...]) -> float:
    """Return Silverman's width of a kernel for that many values."""
    return 0.9 * statistics.stdev(ratios) / math.pow(len(ratios), 0.2)
