"""A sweep: each mode at several values of one setting, with the same seeds, and the values at which it trains.

A comparison at one learning rate says nothing of another: half precision may train at fewer rates than float32, or at
other ones. The runs are those of a comparison (`mpt.workflows.comparing.compare`), a side for each mode and value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpt.config.checking.precision_names import FLOAT32
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.errors import ConfigError
from mpt.report.comparing.groups import Group
from mpt.report.comparing.sequential import FEWEST
from mpt.report.comparing.statistics import Margin
from mpt.report.comparing.sweep import Sweep, read_sweep
from mpt.report.comparison_pages.sweep_page import write_sweep
from mpt.report.units import show_figure
from mpt.workflows.comparing.compare import Trainer, describe_start, opened_folder, run_sides
from mpt.workflows.comparing.compare_jobs import Jobs, choose_jobs
from mpt.workflows.comparing.compare_sides import Sides
from mpt.workflows.processes.training_process import Check, Train

MARGIN = "10%"
"""Worse by this than the best value is no longer training, unless the user says otherwise."""
TIMES = "x"
"""Behind a number: a multiple of the configuration's value."""


@dataclass(frozen=True)
class Over:
    """The content of `--over`: a setting and its values as they were written, in rising order."""

    key: str
    words: Sequence[str]

    @property
    def are_factors(self) -> bool:
        """Return whether the values are multiples of the configuration's own."""
        return self.words[0].endswith(TIMES)

    @classmethod
    def parse(cls, text: str) -> Over:
        """Read `optimizer.lr=0.5x,1x,2x` or `optimizer.lr=1e-4,1e-3`. Raises ConfigError."""
        key, _, values = (part.strip() for part in text.partition("="))
        words = [word.strip() for word in values.split(",") if word.strip()]
        sizes = [positive(word.removesuffix(TIMES)) for word in words]
        kinds = {word.endswith(TIMES) for word in words}
        if (
            not key
            or len(words) < 2
            or None in sizes
            or len(kinds) > 1
            or len(set(sizes)) < len(sizes)
        ):
            raise ConfigError(
                f"--over: found {text!r}; write KEY=VALUE,VALUE with two positive numbers or more, all as multiples "
                "(optimizer.lr=0.5x,1x,2x) or all as they are (optimizer.lr=1e-4,2e-4)."
            )
        return cls(key, sorted(words, key=lambda word: float(word.removesuffix(TIMES))))


def positive(word: str) -> float | None:
    """Read a positive number; None if it is none."""
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


class Swept(Sides):
    """Sides at several values: a configuration for each mode and value, labelled `fp32 at 2x`."""

    def __init__(self, sides: Sides, over: Over, allow: Sequence[str] = ()) -> None:
        self.over, self.sides = over, sides
        self.places: dict[str, tuple[str, float]] = {}
        """Label -> mode and value, relative to the configuration's own if the values are multiples."""
        configs = {}
        for word, (mode, config) in itertools.product(over.words, sides.configs.items()):
            label = f"{mode} at {word}"
            configs[label] = at_value(config, over, word, allow)
            self.places[label] = mode, float(word.removesuffix(TIMES))
        super().__init__(configs, sides.base, by_mode=False, is_demo=False)

    @property
    def name(self) -> str:
        """Return the sweep's name if the user gives none."""
        return f"{self.sides.name.replace('compare', 'sweep', 1)}-{self.over.key}"[:90]

    @property
    def checked(self) -> Sequence[str]:
        """One value of each mode: a mode's refusals do not depend on the value."""
        return list(self.configs)[1 : len(self.sides.configs)]


def at_value(config: Config, over: Over, word: str, allow: Sequence[str]) -> Config:
    """Return a configuration at one value, of every phase of an optimizer that has its own.

    Raises ConfigError for a setting that is not there or, for a multiple, has no number.
    """
    data = config.to_data()
    size = float(word.removesuffix(TIMES))
    changes = []
    for key, found in settings_of(data, over.key):
        if over.are_factors and (
            isinstance(found, bool) or not isinstance(found, int | float) or found <= 0
        ):
            said = "is not set" if found is None else f"is {found!r}"
            raise ConfigError(
                f"--over: {key} {said} in this configuration, so it has no multiples; write values."
            )
        changes.append(f"{key}={size * found!r}" if over.are_factors else f"{key}={word}")
    return load_config(data, changes, allow=[*allow, *config.granted])


def settings_of(data: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    """Return a setting and the configuration's value, and those of the same name in `optimizer.phases`."""
    found = [(key, value_at(data, key.split(".")))]
    section, _, name = key.rpartition(".")
    phases = value_at(data, ["optimizer", "phases"]) if section == "optimizer" else None
    for phase, settings in phases.items() if isinstance(phases, Mapping) else ():
        if isinstance(settings, Mapping) and settings.get(name) is not None:
            found.append((f"optimizer.phases.{phase}.{name}", settings[name]))
    return found


def value_at(data: Any, path: Sequence[str]) -> Any:
    """Return a nested mapping's value at a path, None if there is nothing."""
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def compare_over(
    swept: Swept,
    *,
    margin: str = MARGIN,
    seeds: int | None = None,
    jobs: int | None = None,
    name: str | None = None,
    output: Path | None = None,
    runs: Path = Path("runs"),
    quiet: bool = False,
    train: Train | None = None,
    check: Check | None = None,
) -> tuple[Sweep, Path]:
    """Train each mode at each value with the same seeds, write the sweep, and return it with its folder.

    The parameters are those of `mpt.workflows.comparing.compare.compare`. Raises ConfigError for numbers that make no
    sweep.
    """
    wanted = Margin.parse(margin)
    count = FEWEST if seeds is None else seeds
    if count < FEWEST:
        raise ConfigError(
            f"--seeds: found {count}; allowed with --over is {FEWEST} or more, for its intervals."
        )
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs: found {jobs}; allowed is 1 or more.")
    with opened_folder(swept, output, name, runs) as folder:
        chosen = (
            choose_jobs(list(swept.configs.values()), count, jobs)
            if train is None
            else Jobs(jobs or 1, "")
        )
        if train is None and not quiet:
            print(describe_start(swept, folder, [count], chosen), flush=True)
        groups = run_sides(Trainer(folder, swept, chosen, train, check), count, set(), quiet=quiet)
        sweep = read_sweep(swept.over.key, by_mode(swept, groups), wanted)
        write_sweep(folder, sweep, multiples=swept.over.are_factors)
    return sweep, folder


def by_mode(swept: Swept, groups: Sequence[Group]) -> dict[str, list[tuple[float, str, Group]]]:
    """Return value, its word and runs for each mode, the baseline mode first."""
    modes = sorted(swept.sides.configs, key=lambda mode: mode != FLOAT32)
    found: dict[str, list[tuple[float, str, Group]]] = {mode: [] for mode in modes}
    for group in groups:
        mode, value = swept.places[group.label]
        word = show_figure(value) + ("x" if swept.over.are_factors else "")
        found[mode].append((value, word, group))
    return found
