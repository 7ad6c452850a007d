"""Several modes side by side: the cost of each, as ratios to the baseline, and whether its metric is as good.

A group is one mode's runs by seed. Its time and memory are medians over the seeds, and ratios are of these figures, as
shown. Times are those of runs that had the processor for themselves, as long as there are such. The baseline is fp32 if
it takes part, else the first group named. Runs are comparable when they train the same model on the same data towards
the same metric; whatever else their configs disagree on is allowed, because that may be what is being compared, but
said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpt.config.checking.precision_names import FLOAT32
from mpt.config.differences import flatten
from mpt.errors import ConfigError
from mpt.report.comparing.intervals import Spread, spread
from mpt.report.comparing.resolution import resolution_of
from mpt.report.comparing.statistics import Margin, Verdict, judge, judge_until, open_verdict
from mpt.report.comparing.unfinished import cut_short, diverged
from mpt.report.reading.log_values import curves
from mpt.report.reading.run_record import RunRecord

MOST_NOTES = 3
"""Settings of a section that differ and are listed one by one."""
EXPECTED_DIFFERENCES = ("name", "seed", "precision")
"""Config sections in which the runs of a comparison differ on purpose."""


@dataclass(frozen=True)
class Group:
    """One mode: its runs by seed. `failed` holds the ends of seeds whose run diverged."""

    label: str
    runs: Mapping[int, RunRecord]
    failed: Mapping[int, str]

    @property
    def finals(self) -> dict[int, float]:
        """Seed -> last metric; NaN if the run diverged."""
        return {
            seed: math.nan if seed in self.failed else record.final
            for seed, record in self.runs.items()
        }

    @property
    def timed(self) -> Mapping[int, RunRecord]:
        """The runs whose times count: those that had the processor for themselves, or all if none had."""
        return {
            seed: record for seed, record in self.runs.items() if record.at_a_time == 1
        } or self.runs

    @property
    def any_run(self) -> RunRecord:
        """A run to ask for values that all runs of the group share: a finished one if there is one."""
        return max(self.runs.values(), key=lambda record: record.is_finished)


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


def check_comparable(groups: Sequence[Group], *, models_differ: bool = False) -> None:
    """Refuse runs of different models, data or metrics."""
    facts: Sequence[tuple[str, Callable[[RunRecord], str]]] = (
        ("model", lambda record: record.model),
        ("data set", lambda record: record.dataset),
        (
            "metric",
            lambda record: record.metric if record.evaluations or record.is_finished else "",
        ),
    )
    for name, read in facts:
        if name == "model" and models_differ:
            continue
        holders: dict[str, str] = {}
        for group in groups:
            for record in group.runs.values():
                if read(record):
                    holders.setdefault(read(record), str(record.path))
        if len(holders) > 1:
            found = "; ".join(f"{value!r} in {path}" for value, path in holders.items())
            raise ConfigError(
                f"These runs cannot be compared: their {name} differs ({found}). Name runs of one {name}."
            )


def check_test_sets(groups: Sequence[Group]) -> None:
    """Refuse runs that the same settings evaluated on different samples: the files were changed in between."""
    seen: dict[str, RunRecord] = {}
    for group in groups:
        for record in group.runs.values():
            if not record.test_set:
                continue
            settings = f"{record.seed} {sorted(flatten({'dataset': record.config.get('dataset')}).items())}"
            other = seen.setdefault(settings, record)
            if other.test_set != record.test_set:
                raise ConfigError(
                    f"These runs cannot be compared: the test set of {other.path} and {record.path} has the same "
                    "settings and other samples; its files were changed in between. Train or evaluate both on one."
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


def find_notes(groups: Sequence[Group]) -> list[str]:
    """Return the caveats of the table."""
    records = [record for group in groups for record in group.runs.values()]
    failed = [
        f"{group.label}, seed {seed}: {why}"
        for group in groups
        for seed, why in sorted(group.failed.items())
    ]
    changed = [
        f"{one.name}: a resume at step {step} {what}."
        for one in records
        for step, what in one.settings_changes
    ]
    return [
        *failed,
        *note_unknown(records),
        *changed,
        *note_settings(records),
        *note_machines(records),
        *note_times(groups),
        *note_memory(records),
        *note_unfinished(groups),
    ]


def note_unknown(records: Sequence[RunRecord]) -> list[str]:
    """Say which runs have no configuration that can be read."""
    unknown = [record.name for record in records if not record.config]
    if not unknown:
        return []
    return [
        f"Without a config that can be read, so how they were trained is not known: {', '.join(unknown)}."
    ]


def note_settings(records: Sequence[RunRecord]) -> list[str]:
    """Return notes on settings that differ and are not the subject of the comparison."""
    notes = []
    for section, differing in unexpected_differences(records).items():
        # another optimizer or model: its name says more than all its settings
        if len(differing) > MOST_NOTES:
            told = f"{section}.name"
            names = (
                f" {told}: {', '.join(differing.pop(told))}, and in" if told in differing else ""
            )
            keys = ", ".join(key.removeprefix(f"{section}.") for key in differing)
            notes.append(
                f"The configs also differ in{names} {len(differing)} other settings of {section}: {keys}."
            )
        else:
            notes += [
                f"The configs also differ in {key}: {', '.join(vs)}."
                for key, vs in differing.items()
            ]
    return notes


def unexpected_differences(records: Sequence[RunRecord]) -> dict[str, dict[str, list[str]]]:
    """Return by section the settings that runs should have in common and have not, with their values in the order of
    the runs.
    """
    configs = [flatten(record.config) for record in records if record.config]
    sections: dict[str, dict[str, list[str]]] = {}
    for key in sorted({key for config in configs for key in config}):
        values = list(dict.fromkeys(str(config.get(key)) for config in configs))
        section = key.split(".")[0]
        if len(values) > 1 and section not in EXPECTED_DIFFERENCES:
            sections.setdefault(section, {})[key] = values
    return sections


def note_machines(records: Sequence[RunRecord]) -> list[str]:
    """Return a note if the runs come from several machines."""
    machines = {machine(record) for record in records} - {""}
    if len(machines) < 2:
        return []
    return [
        f"The runs come from different machines: {'; '.join(sorted(machines))}. Times are not comparable."
    ]


def note_memory(records: Sequence[RunRecord]) -> list[str]:
    """Return a note if memory was measured in different ways."""
    kinds = {str(record.memory.get("kind")) for record in records if record.memory}
    if len(kinds) < 2:
        return []
    return [
        f"Memory was measured in different ways ({', '.join(sorted(kinds))}), so it has no ratio."
    ]


def note_unfinished(groups: Sequence[Group]) -> list[str]:
    """Say of which unfinished runs an evaluation counts as the final one."""
    unfinished = [
        str(record.path.name)
        for group in groups
        for seed, record in group.runs.items()
        if record.evaluations and not record.is_finished and seed not in group.failed
    ]
    if not unfinished:
        return []
    return [
        f"Not finished, so their last evaluation counts as the final one: {', '.join(unfinished)}."
    ]


def note_times(groups: Sequence[Group]) -> list[str]:
    """Say which runs' times were left out, or count although others ran alongside."""
    most = max(record.at_a_time for group in groups for record in group.runs.values())
    if most == 1:
        return []
    crowded = [
        group.label
        for group in groups
        if any(record.at_a_time > 1 for record in group.timed.values())
    ]
    if crowded:
        return [
            f"Up to {most} runs at a time: the step times of {', '.join(crowded)} were measured side by side."
        ]
    seeds = sorted({seed for group in groups for seed in group.timed})
    return [
        f"Step times and throughput are those of seed {', '.join(map(str, seeds))}, whose runs were alone; the others "
        f"were trained {most} at a time."
    ]


def machine(record: RunRecord) -> str:
    """Return the identity of a run's device, as far as its environment names it."""
    devices = record.environment.get("devices")
    if (
        record.is_on_gpu
        and isinstance(devices, list)
        and devices
        and isinstance(devices[0], Mapping)
    ):
        return str(devices[0].get("name", ""))
    return str(record.environment.get("processor", ""))


def positive_median(values: Sequence[float]) -> float:
    """Return the median of positive figures; NaN if there is none.

    Between the middle two of an even number it is their geometric mean: a ratio of times and that of the throughputs
    then say the same.
    """
    known = sorted(value for value in values if value > 0 and math.isfinite(value))
    if not known:
        return math.nan
    low, high = known[(len(known) - 1) // 2], known[len(known) // 2]
    return low if low == high else math.sqrt(low * high)


def divide(value: float, base: float) -> float:
    """Return a ratio; NaN without a base."""
    return value / base if base and math.isfinite(base) else math.nan


def group_runs(records: Sequence[RunRecord]) -> list[Group]:
    """Group finished runs for a comparison: by mode if they differ in it, else each run alone, as if the mode of one is
    not known.

    One that NaN ended counts as diverged.
    Raises ConfigError for the same run, or two runs of one mode and seed, given twice.
    """
    paths = [record.path.resolve() for record in records]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice:
        raise ConfigError(f"{twice} was given twice; a run cannot be compared with itself.")
    modes = [record.mode for record in records]
    by_mode = len(set(modes)) > 1 and all(modes)
    members: dict[str, dict[int, RunRecord]] = {}
    for label, record in zip(modes if by_mode else names_apart(paths), records, strict=True):
        seed = record.seed if record.seed is not None else 0
        runs = members.setdefault(label, {})
        if seed in runs:
            raise ConfigError(
                f"{runs[seed].path} and {record.path} are both {label} with seed {seed}; "
                "give one run per mode and seed."
            )
        runs[seed] = record
    return [Group(label, runs, diverged(runs)) for label, runs in members.items()]


def names_apart(paths: Sequence[Path]) -> list[str]:
    """Return the names of folders, with as many of those above as it takes to tell them apart."""
    for depth in itertools.count(1):
        names = [Path(*path.parts[-depth:]).as_posix() for path in paths]
        if len(set(names)) == len(paths):
            return names
    raise AssertionError("different paths differ somewhere")
