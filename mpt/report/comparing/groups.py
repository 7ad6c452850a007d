"""The runs of one mode by seed, and whether runs can be compared: one model on the same data towards one metric."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpt.config.differences import flatten
from mpt.errors import ConfigError
from mpt.report.comparing.unfinished import diverged
from mpt.report.reading.run_record import RunRecord


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


def group_runs(records: Sequence[RunRecord]) -> list[Group]:
    """Group finished runs for a comparison: by model and mode, as far as they differ in these; else each run alone, as
    if that of one is not known.

    One that NaN ended counts as diverged.
    Raises ConfigError for the same run, or two runs of one mode and seed, given twice.
    """
    paths = [record.path.resolve() for record in records]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice:
        raise ConfigError(f"{twice} was given twice; a run cannot be compared with itself.")
    facets = [[record.model for record in records], [record.mode for record in records]]
    telling = [values for values in facets if len({*values} - {""}) > 1]
    known = bool(telling) and all(itertools.chain(*telling))
    labels = [" ".join(values) for values in zip(*telling)] if known else names_apart(paths)
    members: dict[str, dict[int, RunRecord]] = {}
    for label, record in zip(labels, records, strict=True):
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
