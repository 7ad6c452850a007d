"""Several modes side by side: the cost of each, as ratios to the baseline, and whether its metric is as good.

A group is one mode's runs by seed. Its time and memory are medians over the seeds, and ratios are of these figures, as
shown. Times are those of runs that had the processor for themselves, as long as there are such. The baseline is fp32 if
it takes part, else the first group named. Runs are comparable when they train the same model on the same data towards
the same metric; whatever else their configs disagree on is allowed, because that may be what is being compared, but
said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low

from mpt.config.checking.precision_names import FLOAT32
from mpt.errors import ConfigError
from mpt.report.comparing.groups import Group, check_comparable, check_test_sets
from mpt.report.comparing.intervals import Spread, spread
from mpt.report.comparing.notes import find_notes
from mpt.report.comparing.resolution import resolution_of
from mpt.report.comparing.statistics import Margin, Verdict, judge, judge_until, open_verdict
from mpt.report.comparing.unfinished import cut_short
from mpt.report.reading.log_values import curves
from mpt.report.reading.run_record import RunRecord


@dataclass(frozen=True)
class Row:
    """One mode's figures and their ratios to the baseline's (NaN if either was not measured)."""

    group: Group
    peak_bytes: float
    peak_ratio: float
    step_seconds: float
    step_ratio: float
    samples_per_second: float
    throughput_ratio: float
    skipped: int
    final: Spread
    final_ratio: float
    best: Spread
    best_ratio: float
    scales: Mapping[str, tuple[float, float, float]]
    """Phase -> the loss scale at first, at its lowest and at last, of the first seed."""
    verdict: Verdict | None
    """None for the baseline."""


@dataclass(frozen=True)
class Comparison:
    """All that the outputs say."""

    rows: Sequence[Row]
    margin: Margin
    metric: str
    higher_is_better: bool
    seeds: Sequence[int]
    notes: Sequence[str]
    most_seeds: int | None = None
    """The limit if seeds are added until the verdicts are in."""

    @property
    def baseline(self) -> Row:
        """The row to which the others are held."""
        return self.rows[0]

    @property
    def is_decided(self) -> bool:
        """Is every verdict in?"""
        return all(row.verdict is None or row.verdict.outcome != "undecided" for row in self.rows)

    @property
    def passes(self) -> bool:
        """Is every mode within the margin?"""
        return all(row.verdict is None or row.verdict.outcome == "within" for row in self.rows)


def compare_groups(
    groups: Sequence[Group],
    margin: Margin,
    most_seeds: int | None = None,
    *,
    models_differ: bool = False,
) -> Comparison:
    """Hold every group to the baseline. Raises ConfigError when the runs cannot be compared.

    `most_seeds` makes the verdicts those of a sequential test that ends there. `models_differ` allows it.
    """
    if len(groups) < 2:
        raise ConfigError("A comparison needs two modes or two runs at least; name another one.")
    check_comparable(groups, models_differ=models_differ)
    check_test_sets(groups)
    # stable: the others stay as they were named
    ordered = sorted(groups, key=lambda group: group.label != FLOAT32)
    baseline = ordered[0]
    with_metric = [group.any_run for group in ordered if group.any_run.metric]
    example = with_metric[0] if with_metric else baseline.any_run
    return Comparison(
        rows=[describe(group, baseline, margin, example, most_seeds) for group in ordered],
        margin=margin,
        metric=example.metric or "metric",
        higher_is_better=example.higher_is_better,
        seeds=sorted({seed for group in ordered for seed in group.runs}),
        notes=find_notes(ordered),
        most_seeds=most_seeds,
    )


def describe(
    group: Group, baseline: Group, margin: Margin, example: RunRecord, most_seeds: int | None = None
) -> Row:
    """Return a group's figures compared with the baseline's."""

    def typical(
        read: Callable[[RunRecord], float],
        own: Mapping[int, RunRecord],
        base: Mapping[int, RunRecord],
    ) -> tuple[float, float]:
        shown = positive_median([read(record) for record in own.values()])
        return shown, divide(shown, positive_median([read(record) for record in base.values()]))

    same_measure = group.any_run.memory.get("kind") == baseline.any_run.memory.get("kind")
    peak, peak_ratio = typical(lambda record: record.step_peak_bytes, group.runs, baseline.runs)
    step, step_ratio = typical(lambda record: record.step_seconds, group.timed, baseline.timed)
    throughput, throughput_ratio = typical(
        lambda record: record.samples_per_second, group.timed, baseline.timed
    )
    final, best = (
        spread(list(group.finals.values())),
        spread([record.best for record in group.runs.values()]),
    )
    base_final = spread(list(baseline.finals.values()))
    base_best = spread([record.best for record in baseline.runs.values()])
    verdict = None
    if group is not baseline:
        finals, better = (baseline.finals, group.finals), example.higher_is_better
        resolution = resolution_of(baseline.runs, group.runs)
        if unequal := cut_short(baseline.runs, group.runs, baseline.failed, group.failed):
            verdict = open_verdict(unequal, margin, len(baseline.runs.keys() & group.runs.keys()))
        elif most_seeds is None:
            verdict = judge(*finals, margin, higher_is_better=better, resolution=resolution)
        else:
            verdict = judge_until(
                *finals, margin, most_seeds, higher_is_better=better, resolution=resolution
            )
    return Row(
        group=group,
        peak_bytes=peak,
        peak_ratio=peak_ratio if same_measure else math.nan,
        step_seconds=step,
        step_ratio=step_ratio,
        samples_per_second=throughput,
        throughput_ratio=throughput_ratio,
        skipped=sum(sum(record.skipped.values()) for record in group.runs.values()),
        final=final,
        final_ratio=divide(final.mean, base_final.mean),
        best=best,
        best_ratio=divide(best.mean, base_best.mean),
        scales=scale_history(next(iter(group.runs.values()))),
        verdict=verdict,
    )


def scale_history(record: RunRecord) -> dict[str, tuple[float, float, float]]:
    """Return phase -> first, lowest and last loss scale; nothing for phases that are not scaled."""
    found = {}
    for phase, (_, values) in curves(record.train, "scale").items():
        finite = [value for value in values if math.isfinite(value)]
        if finite and set(finite) != {1.0}:
            found[phase] = (finite[0], min(finite), finite[-1])
    return found


def positive_median(values: Sequence[float]) -> float:
    """Return the median of positive figures; NaN if there is none.

    Between the middle two of an even number it is their geometric mean: a ratio of times and that of the throughputs
    then say the same.
    """
    known = [value for value in values if value > 0 and math.isfinite(value)]
    if not known:
        return math.nan
    low, high = median_low(known), median_high(known)
    return low if low == high else math.sqrt(low * high)


def divide(value: float, base: float) -> float:
    """Return a ratio; NaN without a base."""
    return value / base if base and math.isfinite(base) else math.nan
