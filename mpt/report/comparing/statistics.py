"""Is one mode as good as another? An equivalence test over paired seeds, and the number of seeds to decide.

The absence of a significant difference proves nothing: two seeds of anything show none. So the question is turned round
(Schuirmann 1987, two one-sided tests): the modes count as equivalent only if a 90 % confidence interval of the
difference lies wholly inside the margin, which is the same as rejecting both "worse by more than the margin" and
"better by more" at 5 % each. If the interval lies wholly outside, the difference is real and too large; otherwise
these seeds decide nothing.

Runs with the same seed share their initial weights and data order, so differences are taken per seed. A margin in per
cent is a statement about a ratio whose denominator, the baseline's mean, is itself measured with error; its interval
is Fieller's (1954), which accounts for that and for the pairing. A run that ended in NaN counts as a failure of its
mode, never as missing: leaving it out would report the survivors only.

A metric that counts (an accuracy, mAP) moves in steps of one test sample or object, so no interval is taken for
narrower than one step (`mpt.report.comparing.resolution`): ties of a small test set show no equality.

The t interval assumes differences that are about normal, and a verdict "within" says so. From `FEW` seeds on gross
departures are looked for. scripts/quality/verdict_table.py measures the error rates, including those of distributions
for which none is claimed.

Seeds may be added until the verdict is in, if each look is stricter for it (`judge_until`,
`mpt.report.comparing.sequential`).

It does not correct for many modes compared at once: each verdict is a claim of its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import covariance
from typing import Literal

from mpt.errors import ConfigError
from mpt.report.comparing.intervals import (
    LEVEL,
    difference_interval,
    fieller_interval,
    student_quantile,
)
from mpt.report.comparing.resolution import CONTINUOUS, Resolution
from mpt.report.comparing.sequential import FEWEST, levels

POWER = 0.8
"""Chance of a decision that the wanted number of seeds should give."""
MOST_SEEDS = 100_000
FEW = 8
"""Fewer paired seeds than these cannot show a departure from normal differences."""

Outcome = Literal["within", "outside", "undecided"]


@dataclass(frozen=True)
class Margin:
    """The largest difference that does not matter: a share of the baseline's mean, or an amount in the metric's
    unit."""

    size: float
    relative: bool

    @classmethod
    def parse(cls, text: str, option: str = "--margin") -> Margin:
        """Read `1%` as a share of the baseline's mean and `0.5` as an amount in the metric's unit."""
        stripped = text.strip()
        relative = stripped.endswith("%")
        try:
            size = float(stripped.removesuffix("%"))
        except ValueError:
            size = math.nan
        if not (math.isfinite(size) and size > 0):
            raise ConfigError(
                f"{option}: found {text!r}; allowed is a positive share of the baseline such as '1%', or a positive "
                "amount in the metric's own unit such as '0.5'."
            )
        return cls(size / 100 if relative else size, relative)

    def show(self, value: float) -> str:
        """Write a difference in the margin's unit."""
        return f"{value * 100:+.2f} %" if self.relative else f"{value:+.4g}"

    def __str__(self) -> str:
        return f"{self.size * 100:g} %" if self.relative else f"{self.size:g}"


@dataclass(frozen=True)
class Verdict:
    """The answer for one mode. Differences are mode minus baseline; relative ones are shares of the baseline's mean."""

    outcome: Outcome
    direction: Literal["better", "worse", "same", "unknown"]
    difference: float
    low: float
    high: float
    margin: Margin
    seeds: int
    seeds_wanted: int | None
    """About how many paired seeds would decide, if mean and spread stay as they are. None: known already, or not
    knowable."""
    reason: str

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        if self.outcome == "within":
            return "within the margin"
        if self.outcome == "outside":
            return f"outside the margin ({self.direction})"
        clear = self.low > 0 or self.high < 0
        return f"{self.direction}, size not decided" if clear else "not decidable"


def judge(
    baseline: Mapping[int, float],
    other: Mapping[int, float],
    margin: Margin,
    *,
    higher_is_better: bool,
    level: float = LEVEL,
    most: int | None = None,
    resolution: Resolution = CONTINUOUS,
) -> Verdict:
    """Decide whether `other` equals `baseline` within the margin, over the seeds that both have (seed -> metric).

    `level` is the error rate of each one-sided test, `most` the number of seeds at which a sequential test ends,
    `resolution` the effect of a single test sample on the metric.
    """
    seeds = sorted(baseline.keys() & other.keys())
    first, second = [baseline[seed] for seed in seeds], [other[seed] for seed in seeds]

    def undecided(reason: str, wanted: int | None = None, difference: float = math.nan) -> Verdict:
        return open_verdict(reason, margin, len(seeds), wanted, difference)

    if not seeds:
        return undecided("They have no seed in common.")
    failed = [seed for seed in seeds if not math.isfinite(baseline[seed])]
    if failed:
        return undecided(f"The baseline itself has no finite metric for seed {join(failed)}.")
    failed = [seed for seed in seeds if not math.isfinite(other[seed])]
    if failed:
        reason = (
            f"No finite metric for seed {join(failed)}: the run diverged and the baseline did not."
        )
        return Verdict(
            "outside", "worse", math.nan, -math.inf, math.inf, margin, len(seeds), None, reason
        )
    scale = math.fsum(first) / len(first)
    if margin.relative and scale == 0:
        return undecided(
            "The baseline's mean is zero, so a share of it means nothing: give --margin as an amount."
        )
    difference = math.fsum(second) / len(second) - scale
    if margin.relative:
        difference /= abs(scale)
    if len(seeds) < FEWEST:
        count = "One seed shows" if len(seeds) == 1 else "Two seeds show"
        return undecided(
            f"{count} too little of the spread to decide: use --seeds 3 or more.", None, difference
        )
    interval = fieller_interval if margin.relative else difference_interval
    low, high = interval(first, second, level)
    if math.isinf(low):
        deviation = math.sqrt(covariance(first, first))
        return undecided(
            f"The baseline's {len(seeds)} seeds lie so far apart (mean {scale:.4g}, standard deviation "
            f"{deviation:.4g}) that a share of their mean is not determined: use more seeds, or give "
            "--margin as an amount.",
            None,
            difference,
        )
    step = resolution.step / abs(scale) if margin.relative else resolution.step
    low, high = min(low, difference - step), max(high, difference + step)
    if step and step >= abs(margin.size - abs(difference)):
        return too_coarse(
            difference, (low, high), margin, len(seeds), resolution, scale, higher_is_better
        )
    return conclude(
        first,
        second,
        difference,
        (low, high),
        margin,
        level,
        most,
        higher_is_better=higher_is_better,
        resolution=resolution.step,
    )


def open_verdict(
    reason: str,
    margin: Margin,
    seeds: int,
    wanted: int | None = None,
    difference: float = math.nan,
) -> Verdict:
    """Return the verdict that nothing is known of a difference, for a reason."""
    return Verdict(
        "undecided", "unknown", difference, -math.inf, math.inf, margin, seeds, wanted, reason
    )


def too_coarse(
    difference: float,
    interval: tuple[float, float],
    margin: Margin,
    seeds: int,
    resolution: Resolution,
    scale: float,
    higher_is_better: bool,
) -> Verdict:
    """Return the verdict on a difference that one test sample more or less would carry across the margin's edge."""
    direction = direction_of(difference, higher_is_better)
    unit = abs(scale) if margin.relative else 1.0
    if math.isinf(resolution.step):
        reason = (
            "Not decidable with this test set: the metric is the same to the last digit for every seed although the "
            "trainings differ, so it moves in steps, of a size that is not known: evaluate on more samples."
        )
    else:
        advice = resolution.wanted(abs(margin.size - abs(difference)) * unit)
        reason = (
            f"Not decidable with this test set: {resolution.cause} is "
            f"{margin.show(resolution.step / unit).lstrip('+')} of the metric, too coarse for a difference of "
            f"{margin.show(difference)} and a margin of ±{margin}{'; ' * bool(advice)}{advice}."
        )
    return Verdict("undecided", direction, difference, *interval, margin, seeds, None, reason)


def direction_of(difference: float, higher_is_better: bool) -> Literal["better", "worse", "same"]:
    """Return which way a difference of the metric points."""
    if difference == 0:
        return "same"
    return "better" if (difference > 0) == higher_is_better else "worse"


def judge_until(
    baseline: Mapping[int, float],
    other: Mapping[int, float],
    margin: Margin,
    most: int,
    *,
    higher_is_better: bool,
    resolution: Resolution = CONTINUOUS,
) -> Verdict:
    """Judge at the last look that these seeds reach, with the error rates of a single one. At most `most` count.

    Seeds count in ascending order. The intervals of all looks hold together, so the last look is as good as the first
    that decided, and knows more: a seed that collapsed since takes a verdict back. A run that diverged counts at any
    seed.
    """
    common = sorted(baseline.keys() & other.keys())
    if any(math.isfinite(baseline[seed]) and not math.isfinite(other[seed]) for seed in common):
        return judge(baseline, other, margin, higher_is_better=higher_is_better, most=most)
    strictness = levels(most)
    look = max((one for one in strictness if one <= len(common)), default=FEWEST)
    first, second = ({seed: side[seed] for seed in common[:look]} for side in (baseline, other))
    level = strictness[look]
    return judge(
        first,
        second,
        margin,
        higher_is_better=higher_is_better,
        level=level,
        most=most,
        resolution=resolution,
    )


def conclude(
    first: Sequence[float],
    second: Sequence[float],
    difference: float,
    interval: tuple[float, float],
    margin: Margin,
    level: float,
    most: int | None,
    *,
    higher_is_better: bool,
    resolution: float,
) -> Verdict:
    """Read the verdict off an interval."""
    low, high = interval
    direction = direction_of(difference, higher_is_better)
    share = f"{100 * (1 - 2 * level):.3g} %"
    said = f"{share} interval {margin.show(low)} to {margin.show(high)}"
    looked = (
        f" Looked at after each seed, of {most} at most, with 5 % error on each side altogether."
        if most
        else ""
    )
    flat = (
        " The differences do not vary between seeds, so the interval has no width."
        if low == high
        else ""
    )
    count, wanted = len(first), None
    outcome: Outcome
    differences = [after - before for before, after in zip(first, second, strict=True)]
    if -margin.size < low and high < margin.size:
        outcome, reason = (
            "within",
            f"The {said} lies inside ±{margin}.{flat}{looked} {assumption(count)}",
        )
        if is_skewed(differences, resolution):
            outcome = "undecided"
            reason = (
                f"The {said} lies inside ±{margin}, but it assumes that differences between seeds are about normal, "
                f"and these {count} are not (Shapiro-Wilk, 1 %): look at the seeds that lie apart."
            )
    elif low > margin.size or high < -margin.size:
        outcome, reason = (
            "outside",
            f"The {said} lies wholly outside ±{margin}, on the {direction} side.{flat}{looked}",
        )
    else:
        outcome = "undecided"
        wanted = seeds_to_decide(first, second, margin, difference)
        advice = advise_seeds(count, wanted, most, apart=abs(abs(difference) - margin.size) > 0)
        reason = f"The {said} reaches across the edge of ±{margin}. {advice}"
    return Verdict(outcome, direction, difference, low, high, margin, count, wanted, reason)


def is_skewed(differences: Sequence[float], resolution: float) -> bool:
    """Return whether these differences are too unlike normal ones (Shapiro and Wilk 1965, at 1 %) for a t interval.

    Never with fewer than `FEW`, which cannot show it, and never of a metric that moves in few steps.
    """
    if len(differences) < FEW or max(differences) - min(differences) <= 10 * resolution:
        return False
    from scipy.stats import shapiro  # takes a second to import

    return float(shapiro(differences).pvalue) < 0.01


def assumption(count: int) -> str:
    """Return the assumption behind a verdict, with its limits."""
    share = 100 * (1 - LEVEL ** (1 / count))
    return (
        f"Assumes that differences between seeds are about normal: {count} seeds do not rule out a rare bad one "
        f"(up to {share:.0f} % of seeds)."
    )


def advise_seeds(count: int, wanted: int | None, most: int | None, *, apart: bool) -> str:
    """Say how many more seeds would decide."""
    if wanted is None:
        if apart:
            return f"More than {MOST_SEEDS} seeds would be needed, so near the margin is it; change the margin."
        return "The difference is as large as the margin itself: no number of seeds decides it; change the margin."
    if most is not None and count >= most:
        return (
            f"These {most} seeds are all that were allowed; about {wanted} would decide it "
            "(--max-seeds, or --margin)."
        )
    beyond = "" if most is None or wanted <= most else f", more than the {most} allowed"
    more = "one more" if wanted - count == 1 else f"{wanted - count} more"
    power = f"power {POWER * 100:.0f} %, if mean and spread stay as they are"
    return f"About {wanted} seeds would decide it, {more} than these{beyond} ({power})."


def join(seeds: Sequence[int]) -> str:
    """Write seeds as a list."""
    return ", ".join(str(seed) for seed in seeds)


def seeds_to_decide(
    first: Sequence[float], second: Sequence[float], margin: Margin, difference: float
) -> int | None:
    """Return about how many paired seeds would decide, or None if no number would.

    The usual formula for two one-sided tests, n = ((t_a + t_b) s / distance to the margin)^2 with b halved when the
    difference lies inside, if both sides can miss (Chow, Shao and Wang, Sample Size Calculations in Clinical
    Research).
    """
    scale = abs(math.fsum(first) / len(first)) if margin.relative else 1.0
    # For a share, the residuals about the measured ratio vary (the delta method).
    ratio = difference * math.copysign(1.0, math.fsum(first)) if margin.relative else 0.0
    residuals = [
        (after - before - ratio * before) / scale
        for before, after in zip(first, second, strict=True)
    ]
    deviation = math.sqrt(covariance(residuals, residuals))
    distance = abs(margin.size - abs(difference))
    missed = (1 - POWER) / 2 if abs(difference) < margin.size else 1 - POWER
    if distance == 0:
        return None

    def decides(count: int) -> bool:
        reach = student_quantile(1 - LEVEL, count - 1) + student_quantile(1 - missed, count - 1)
        return reach * deviation / math.sqrt(count) <= distance

    counts = range(MOST_SEEDS + 1)
    wanted = bisect_left(counts, True, lo=len(first) + 1, key=decides)
    return wanted if wanted in counts else None
