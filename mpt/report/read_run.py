"""One finished, running or broken run, read from its files alone.

A report must be possible anywhere and above all for a run that went wrong: no torch, no training code, and every file
may be missing or end in half a line. What could not be read is kept as a list of sentences that the report prints. A
run that was resumed from an earlier checkpoint, or rolled back, holds some steps twice: the later line is what
happened in the end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpt.errors import DataError
from mpt.report.run_files import parse_config, read_last_lines, read_lines, read_object, read_text
from mpt.run.launch import SIDE_BY_SIDE
from mpt.run.layout import CHECKPOINT_NAME

Series = tuple[list[int], list[float]]
"""Steps and the value at each."""

MARKS = ("config.yaml", "metrics.jsonl", "summary.json")
"""A folder with one of these is a run."""


MOST_LINES = 10_000
"""So many lines of the log are read at most; of more, evenly chosen ones: no plot shows as many."""
MOST_OUTLINED = 100
"""The same for a row in a table of runs."""
LASTING = ("metric", "higher_is_better", "precision", "parameters")
"""What a summary of an earlier step still says of the run."""


@dataclass(frozen=True)
class Planned:
    """A peak that was planned, and what it turned out to be, in bytes."""

    name: str
    planned: float
    measured: float

    @property
    def error(self) -> float:
        """How far the plan was off, as a share of what was measured; NaN where one of them is missing."""
        return self.planned / self.measured - 1 if self.measured else math.nan


@dataclass(frozen=True)
class RunRecord:
    """What a run left behind. Mappings are as in the files; the properties fill gaps where they can."""

    path: Path
    config_text: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    train: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    samples: Sequence[Path] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    """What memory was planned beside the training, or the `error` instead; empty where nothing was planned."""
    problems: Sequence[str] = ()
    goes_on: bool = False
    """The run has gone on, or was asked to, past the end that its summary is of."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def is_finished(self) -> bool:
        """Did training reach its end? An interrupted run has a summary too, of the steps it did."""
        steps, wanted = number(self.summary.get("steps")), number(self.summary.get("total_steps"))
        ended = not steps < wanted or bool(self.summary.get("stopped_early"))
        return bool(self.summary) and not self.goes_on and ended

    @property
    def mode(self) -> str:
        """The precision mode's canonical name."""
        return str(section(self.summary, "precision").get("mode") or section(self.config, "precision").get("mode", ""))

    @property
    def dtype(self) -> str:
        """The dtype that was computed in."""
        return str(section(self.summary, "precision").get("dtype", "")).removeprefix("torch.")

    @property
    def reason(self) -> str:
        """Why this mode and dtype were chosen."""
        return str(section(self.summary, "precision").get("reason", ""))

    @property
    def raised_to_float32(self) -> list[str]:
        """The modules that recovery came to keep in float32 beside those of the configuration."""
        found = section(self.summary, "precision").get("raised_to_float32")
        return [str(one) for one in found] if isinstance(found, list) else []

    @property
    def model(self) -> str:
        """The model's name in YAML."""
        return str(section(self.config, "model").get("name", ""))

    @property
    def dataset(self) -> str:
        """The data set's name in YAML."""
        return str(section(self.config, "dataset").get("name", ""))

    @property
    def seed(self) -> int | None:
        """The run's seed."""
        seed = self.config.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def metric(self) -> str:
        """The figure that chooses the best checkpoint."""
        first = next(iter(section(self.evaluations[-1], "metrics")), "") if self.evaluations else ""
        return str(self.summary.get("metric") or first)

    @property
    def higher_is_better(self) -> bool:
        """Which way the metric points; upwards where the run did not say."""
        return bool(self.summary.get("higher_is_better", True))

    @property
    def figures(self) -> dict[str, float]:
        """The last evaluation's figures by name; empty where there was none."""
        last = section(self.evaluations[-1], "metrics") if self.evaluations else {}
        return {name: number(value) for name, value in last.items()}

    @property
    def final(self) -> float:
        """The metric's last value; NaN if there is none."""
        if "final" in self.summary:
            return number(self.summary["final"])
        values = curves(self.evaluations, "metrics").get(self.metric, ([], []))[1]
        return values[-1] if values else math.nan

    @property
    def best(self) -> float:
        """The metric's best value; NaN if there is none."""
        if "best" in self.summary:
            return number(self.summary["best"])
        values = [v for v in curves(self.evaluations, "metrics").get(self.metric, ([], []))[1] if math.isfinite(v)]
        return (max(values) if self.higher_is_better else min(values)) if values else math.nan

    @property
    def steps(self) -> int:
        """Steps done."""
        last = max((int(line.get("step", 0)) for line in self.train), default=0)
        return int(self.summary.get("steps") or last)

    @property
    def step_seconds(self) -> float:
        """Median seconds per step."""
        # A GPU's steps end after the call returns; only the logged windows end with a synchronisation.
        if self.memory.get("kind") == "cuda" and len(self.train) > 2:
            return finite_median([number(line.get("step_seconds")) for line in self.train[1:]])
        return self.figure("median_step_seconds", "step_seconds")

    @property
    def samples_per_second(self) -> float:
        """Throughput of training."""
        if self.memory.get("kind") == "cuda" and len(self.train) > 2:
            return finite_median([number(line.get("samples_per_second")) for line in self.train[1:]])
        return self.figure("samples_per_second", "samples_per_second")

    @property
    def at_a_time(self) -> int:
        """How many runs of a comparison shared the processor with this one, itself included."""
        resumes = self.environment.get("resumes")
        starts = [self.environment, *(resumes if isinstance(resumes, list) else [])]
        counts = [
            number(section(start, "variables").get(SIDE_BY_SIDE), 1.0) for start in starts if isinstance(start, Mapping)
        ]
        return int(max([1.0, *(count for count in counts if math.isfinite(count))]))

    @property
    def memory(self) -> Mapping[str, Any]:
        """Peak memory and its split in bytes, with `kind` saying how it was measured."""
        last: Mapping[str, Any] = next(
            (line["memory"] for line in reversed(self.train) if isinstance(line.get("memory"), dict)), {}
        )
        return section(self.summary, "peak_memory") or last

    @property
    def peak_bytes(self) -> float:
        """Peak memory in bytes; NaN if it was not measured."""
        peak = self.memory.get("peak_bytes")
        if peak is None:
            peaks = [number(section(line, "memory").get("peak_bytes")) for line in self.train]
            return max((value for value in peaks if math.isfinite(value)), default=math.nan)
        return number(peak)

    @property
    def step_peak_bytes(self) -> float:
        """Peak memory of the training's steps alone: on a GPU evaluation, the same in every mode, may need more."""
        return number(self.memory.get("steps_peak_bytes"), 0.0) or self.peak_bytes

    @property
    def settings_changes(self) -> list[tuple[int, str]]:
        """The step and the words of every resume that changed settings; of those from one step the last, which held."""
        changes = (event for event in self.events if event.get("kind") == "settings")
        held = {int(number(event.get("step"), 0)): str(event.get("message", "")) for event in changes}
        return sorted(held.items())

    @property
    def planned(self) -> list[Planned]:
        """The planned peaks that there is a measurement for, taken of the same thing: the training's steps."""
        if self.plan.get("kind") != self.memory.get("kind"):
            return []
        pairs = [
            ("allocated", "peak_bytes", ("steps_peak_bytes", "peak_bytes")),
            ("reserved", "reserved_bytes", ("steps_reserved_bytes", "reserved_bytes")),
        ]
        found = []
        for name, in_plan, in_memory in pairs:
            measured = next((number(self.memory[key]) for key in in_memory if key in self.memory), math.nan)
            row = Planned(name, number(self.plan.get(in_plan)), measured)
            if math.isfinite(row.error):
                found.append(row)
        return found

    @property
    def skipped(self) -> dict[str, int]:
        """Phase -> optimizer steps left out after an overflow."""
        counts = section(self.summary, "skipped") or (section(self.train[-1], "skipped") if self.train else {})
        return {str(phase): int(number(count, 0)) for phase, count in counts.items()}

    def figure(self, in_summary: str, in_lines: str) -> float:
        """Return a figure of the summary or, without one, the median of the training lines."""
        if self.summary.get(in_summary) is not None:  # a summary that was written after a kill has no step times
            return number(self.summary[in_summary])
        return finite_median([number(line.get(in_lines)) for line in self.train])


def read_run(path: Path) -> RunRecord:
    """Read a run directory. Raises DataError if it is none; damaged files become `problems`."""
    check_run(path)
    problems: list[str] = []
    text = read_text(path / "config.yaml", problems)
    lines = read_lines(path / "metrics.jsonl", problems, MOST_LINES)
    config = parse_config(text, problems)
    summary, goes_on = current_summary(path, config, lines, problems)
    return RunRecord(
        path=path,
        config_text=text,
        config=config,
        environment=read_object(path / "env.json", problems),
        train=last_of_each_step([line for line in lines if line.get("kind") == "train"]),
        evaluations=last_of_each_step([line for line in lines if line.get("kind") == "evaluate"]),
        events=read_lines(path / "events.jsonl", problems),
        summary=summary,
        goes_on=goes_on,
        plan=read_object(path / "plan.json", problems, needed=False),
        samples=tuple(sorted(file for file in (path / "samples").glob("*.png") if file.is_file())),
        problems=problems,
    )


def read_outline(path: Path) -> RunRecord:
    """Read of a run what a row in a table of many needs: its settings, its summary and the end of its log.

    The log of a run without a summary that holds is read whole, a few of its lines kept. Raises DataError
    as `read_run`.
    """
    check_run(path)
    problems: list[str] = []
    config = parse_config(read_text(path / "config.yaml", problems), problems)
    lines: Sequence[Mapping[str, Any]] = read_last_lines(path / "metrics.jsonl")
    summary, goes_on = current_summary(path, config, lines, problems)
    if goes_on or not summary:
        lines = read_lines(path / "metrics.jsonl", problems, MOST_OUTLINED)
    return RunRecord(
        path=path,
        config=config,
        train=last_of_each_step([line for line in lines if line.get("kind") == "train"]),
        evaluations=last_of_each_step([line for line in lines if line.get("kind") == "evaluate"]),
        summary=summary,
        goes_on=goes_on,
        problems=problems,
    )


def check_run(path: Path) -> None:
    """Raise DataError for a folder that is no run."""
    if not path.is_dir():
        raise DataError(f"{path}: there is no such run directory.")
    if not any((path / mark).is_file() for mark in MARKS):
        raise DataError(f"{path} is not a run directory: it holds none of {', '.join(MARKS)}.")


def current_summary(
    path: Path, config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], problems: list[str]
) -> tuple[Mapping[str, Any], bool]:
    """Return what of the summary still holds, and whether the run has gone on since it was written.

    A run that was extended and killed has the summary of its earlier end. Then lines or a checkpoint are of a later
    step, or the configuration asks for more steps; of its figures only those stay that do not change.
    """
    summary = read_object(path / "summary.json", problems, needed=False)
    steps = number(summary.get("steps"))
    if not math.isfinite(steps):
        return summary, False
    names = (CHECKPOINT_NAME.fullmatch(entry.name) for entry in (path / "checkpoints").glob("step-*"))
    saved = max((int(name.group(1)) for name in names if name), default=-1)
    reached = max([saved, *(int(number(line.get("step"), -1)) for line in lines)])
    if reached <= steps:
        asked = number(section(config, "train").get("steps"))
        return summary, asked > steps and not summary.get("stopped_early")
    problems.append(
        f"summary.json is of step {steps:.0f} and the run has gone on to step {reached}: its figures are left out."
    )
    return {key: summary[key] for key in LASTING if key in summary}, True


def finite_median(values: Sequence[float]) -> float:
    """Return the median of what is finite; NaN if nothing is."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def section(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a mapping inside a mapping, empty if it is absent or something else."""
    value = mapping.get(key)
    return value if isinstance(value, Mapping) else {}


def number(value: Any, otherwise: float = math.nan) -> float:
    """Read a number that JSON may hold as text ("NaN", "inf") or as null."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return otherwise
    try:
        return float(value)
    except ValueError:
        return otherwise


def curves(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, Series]:
    """Collect a mapping that every line holds under `key` into one series per name."""
    found: dict[str, Series] = {}
    for line in lines:
        for name, value in section(line, key).items():
            if isinstance(value, int | float | str):
                steps, values = found.setdefault(str(name), ([], []))
                steps.append(int(line["step"]))
                values.append(number(value))
    return found


def curve(lines: Sequence[Mapping[str, Any]], key: str) -> Series:
    """Collect one number that every line holds under `key`."""
    found = [(int(line["step"]), number(line[key])) for line in lines if key in line]
    return [step for step, _ in found], [value for _, value in found]


def last_of_each_step(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Keep the last line of every step, in the order of steps."""
    kept = {int(number(line.get("step"), -1)): line for line in lines}
    return [kept[step] for step in sorted(kept) if step >= 0]
