"""At which values of a setting does each mode still train? A sweep's points, windows and edges.

A value trains if the metric there is not worse, by more than the margin, than at the baseline mode's best value: a
one-sided test over paired seeds at 5 % (`mpt.report.comparing.statistics`). It does not train if a seed diverged or
the interval lies beyond the margin, and is not decided otherwise. A mode's window is the run of values around its best
one that train.

Between two values of the grid an edge is interpolated, seed by seed, on a logarithmic scale: the point at which the
metric becomes worse than the baseline's best of that seed by the margin, or half way to a run that diverged. Edges and
best values of the seeds make Student's t intervals of their logarithms, and their ratios to the baseline's, which are
paired. An edge that lies beyond the grid in one seed has no interval: only that it lies beyond is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mpt.errors import ConfigError
from mpt.report.comparing.groups import Group, check_comparable, check_test_sets
from mpt.report.comparing.intervals import LEVEL, Spread, spread, student_quantile
from mpt.report.comparing.resolution import resolution_of
from mpt.report.comparing.statistics import Margin, judge

State = Literal["trains", "does not train", "not decided"]


@dataclass(frozen=True)
class Point:
    """One mode at one value: the final metric by seed, NaN if the run diverged."""

    value: float
    label: str
    finals: Mapping[int, float]
    failed: Mapping[int, str]
    final: Spread
    state: State


@dataclass(frozen=True)
class Estimate:
    """A value of the setting, or a ratio of two, with its 90 % interval; NaN ends for a single seed.

    `beyond` counts the seeds in which it lies outside of the grid: then there is no interval, and `value` is the grid's
    end.
    """

    value: float
    low: float
    high: float
    beyond: int = 0


@dataclass(frozen=True)
class Window:
    """The values at which one mode trains. `lowest` and `highest` are the window's values on the grid, None if nothing
    trains."""

    mode: str
    points: Sequence[Point]
    lowest: Point | None
    highest: Point | None
    lower_edge: Estimate
    upper_edge: Estimate
    best: Estimate
    upper_ratio: Estimate
    """Upper edge over the baseline's, seed by seed."""
    best_ratio: Estimate


@dataclass(frozen=True)
class Sweep:
    """All that the outputs say."""

    key: str
    windows: Sequence[Window]
    margin: Margin
    metric: str
    higher_is_better: bool
    seeds: Sequence[int]
    reference: Point
    """The baseline mode at its best value."""

    @property
    def baseline(self) -> Window:
        """The window of the mode to which the others are held."""
        return self.windows[0]


def read_sweep(
    key: str, modes: Mapping[str, Sequence[tuple[float, str, Group]]], margin: Margin
) -> Sweep:
    """Return the windows of modes, the baseline first, each with its values in rising order, their labels and runs.

    Raises ConfigError when the runs cannot be compared, or the baseline has no value without a run that diverged.
    """
    groups = [group for points in modes.values() for _, _, group in points]
    check_comparable(groups)
    check_test_sets(groups)
    example = max((group.any_run for group in groups), key=lambda record: bool(record.metric))
    better = example.higher_is_better
    baseline = next(iter(modes.values()))
    sound = [
        point
        for point in baseline
        if all(math.isfinite(final) for final in point[2].finals.values())
    ]
    if not sound:
        raise ConfigError(
            f"--over {key}: in {next(iter(modes))} a run diverged at every value; add lower ones."
        )
    sign = 1.0 if better else -1.0
    best_group = max(sound, key=lambda point: sign * spread(list(point[2].finals.values())).mean)[2]

    def describe(value: float, label: str, group: Group) -> Point:
        state: State = "trains"
        if group is not best_group:
            state = state_of(best_group, group, margin, higher_is_better=better)
        return Point(
            value, label, group.finals, group.failed, spread(list(group.finals.values())), state
        )

    described = {mode: [describe(*point) for point in points] for mode, points in modes.items()}
    described_baseline = next(iter(described.values()))
    reference = described_baseline[[group for _, _, group in baseline].index(best_group)]
    seeds = sorted({seed for group in groups for seed in group.runs})
    places = {
        mode: find_places(points, reference, margin, sign) for mode, points in described.items()
    }
    base = next(iter(places.values()))
    windows = [
        describe_window(mode, described[mode], sign, own, base) for mode, own in places.items()
    ]
    return Sweep(key, windows, margin, example.metric or "metric", better, seeds, reference)


def state_of(reference: Group, group: Group, margin: Margin, *, higher_is_better: bool) -> State:
    """Return whether a metric is not worse than the reference's by more than the margin, at 5 %."""
    finals, resolution = group.finals, resolution_of(reference.runs, group.runs)
    verdict = judge(
        reference.finals, finals, margin, higher_is_better=higher_is_better, resolution=resolution
    )
    if not all(math.isfinite(final) for final in finals.values()):
        return "does not train"
    low, high = (verdict.low, verdict.high) if higher_is_better else (-verdict.high, -verdict.low)
    if low > -margin.size:
        return "trains"
    return "does not train" if high < -margin.size else "not decided"


Place = tuple[float, bool]
"""A value of the setting in one seed (NaN if there is none), and whether it lies beyond the grid."""
NOTHING = Estimate(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Places:
    """Edges and best value of one mode, a place for each seed."""

    lower: Sequence[Place]
    upper: Sequence[Place]
    best: Sequence[Place]


def find_places(points: Sequence[Point], reference: Point, margin: Margin, sign: float) -> Places:
    """Return a mode's edges and best values; `sign` is -1 if a lower metric is better."""
    lower, upper, best = [], [], []
    values = [point.value for point in points]
    for seed, final in reference.finals.items():
        quality = [sign * point.finals.get(seed, math.nan) for point in points]
        threshold = sign * final - allowed(margin, reference.final.mean)
        lower.append(edge(values[::-1], quality[::-1], threshold))
        upper.append(edge(values, quality, threshold))
        best.append(summit(values, quality))
    return Places(lower, upper, best)


def describe_window(
    mode: str, points: Sequence[Point], sign: float, own: Places, base: Places
) -> Window:
    """Return the window of one mode, held to the baseline's places."""
    lowest, highest = ends_of(points, sign)
    return Window(
        mode=mode,
        points=points,
        lowest=lowest,
        highest=highest,
        lower_edge=estimate(own.lower),
        upper_edge=estimate(own.upper),
        best=estimate(own.best),
        upper_ratio=ratio(own.upper, base.upper),
        best_ratio=ratio(own.best, base.best),
    )


def allowed(margin: Margin, mean: float) -> float:
    """Return the margin in the metric's unit."""
    return margin.size * abs(mean) if margin.relative else margin.size


def ends_of(points: Sequence[Point], sign: float) -> tuple[Point | None, Point | None]:
    """Return the ends of the run of values that train around the best of them; None, None if none trains."""
    training = [index for index, point in enumerate(points) if point.state == "trains"]
    if not training:
        return None, None
    low = high = max(training, key=lambda index: sign * points[index].final.mean)
    while low - 1 in training:
        low -= 1
    while high + 1 in training:
        high += 1
    return points[low], points[high]


def edge(values: Sequence[float], quality: Sequence[float], threshold: float) -> Place:
    """Return the value at which quality falls below a threshold, from its best value on towards the end of the values.

    Interpolated over the logarithm of the value; half way (geometrically) to a run that diverged, whose quality is NaN.
    """
    finite = [index for index, one in enumerate(quality) if math.isfinite(one)]
    if not finite or quality[start := max(finite, key=lambda index: quality[index])] < threshold:
        return math.nan, False
    for index in range(start, len(values) - 1):
        here, there = quality[index], quality[index + 1]
        if there >= threshold:
            continue
        share = (here - threshold) / (here - there) if math.isfinite(there) else 0.5
        return math.exp(
            (1 - share) * math.log(values[index]) + share * math.log(values[index + 1])
        ), False
    return values[-1], True


def summit(values: Sequence[float], quality: Sequence[float]) -> Place:
    """Return the value of the best quality: the top of the parabola through it and its neighbours, over logarithms."""
    finite = [index for index, one in enumerate(quality) if math.isfinite(one)]
    if not finite:
        return math.nan, False
    top = max(finite, key=lambda index: quality[index])
    if top in (0, len(values) - 1):
        return values[top], True
    logs, heights = (
        [math.log(values[index]) for index in (top - 1, top, top + 1)],
        list(quality[top - 1 : top + 2]),
    )
    if not all(map(math.isfinite, heights)):
        return values[top], False
    left, right = logs[0] - logs[1], logs[2] - logs[1]
    falls = (heights[0] - heights[1], heights[2] - heights[1])
    divisor = 2 * (falls[0] * right - falls[1] * left)
    shift = (falls[0] * right**2 - falls[1] * left**2) / divisor if divisor else 0.0
    return math.exp(logs[1] + min(right, max(left, shift))), False


def estimate(places: Sequence[Place]) -> Estimate:
    """Return the geometric mean over seeds with its 90 % interval."""
    beyond = sum(is_beyond for _, is_beyond in places)
    values = [value for value, _ in places]
    if not values or not all(math.isfinite(value) for value in values):
        return NOTHING
    logs = [math.log(value) for value in values]
    mean = math.fsum(logs) / len(logs)
    if beyond or len(logs) < 2:
        return Estimate(math.exp(mean), math.nan, math.nan, beyond)
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in logs) / (len(logs) - 1))
    reach = student_quantile(1 - LEVEL, len(logs) - 1) * deviation / math.sqrt(len(logs))
    return Estimate(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))


def ratio(places: Sequence[Place], base: Sequence[Place]) -> Estimate:
    """Return the ratio to the baseline's, seed by seed; places beyond the grid on either side leave no interval."""
    return estimate(
        [
            (one / other, beyond or base_beyond)
            for (one, beyond), (other, base_beyond) in zip(places, base, strict=True)
        ]
    )
