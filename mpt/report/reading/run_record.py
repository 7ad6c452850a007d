"""A run's record, with gaps filled as far as its files allow; `mpt.report.reading.read_run` reads them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpt.report.reading.log_values import curves, finite_median, number, section, whole
from mpt.run.process.launch import SIDE_BY_SIDE


@dataclass(frozen=True)
class Planned:
    """A planned peak, and the measured one, in bytes."""

    name: str
    planned: float
    measured: float

    @property
    def error(self) -> float:
        """How far the plan was off, as a share of the measurements; NaN if one of them is missing."""
        return self.planned / self.measured - 1 if self.measured else math.nan


MEASURED_ON_CPU = ("live tensors", "tracked")
"""Kinds of memory figures that no allocator of a GPU has given."""
ENDS = ("stopped", "poisoned", "rank_lost")
"""Kinds of events that end a training, if they are its last."""


@dataclass(frozen=True)
class RunRecord:
    """A run's record. Mappings are as in the files; the properties fill gaps if they can."""

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
    """The memory planned during the training, or the `error` instead; empty if nothing was planned."""
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
        return str(
            section(self.summary, "precision").get("mode")
            or section(self.config, "precision").get("mode", "")
        )

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
        """The modules that recovery came to keep in float32 in addition to those of the configuration."""
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
        last: Mapping[str, Any] = self.evaluations[-1] if self.evaluations else {}
        first = next(iter(section(last, "metrics")), "")
        return str(self.summary.get("metric") or last.get("metric") or first)

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher metric is better; true if the run did not say."""
        last: Mapping[str, Any] = self.evaluations[-1] if self.evaluations else {}
        return bool(self.summary.get("higher_is_better", last.get("higher_is_better", True)))

    @property
    def figures(self) -> dict[str, float]:
        """The last evaluation's figures by name; empty if there was none."""
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
    def final_step(self) -> int:
        """The step of the last evaluation; -1 if there is none."""
        return whole(self.evaluations[-1].get("step"), -1) if self.evaluations else -1

    @property
    def best(self) -> float:
        """The metric's best value; NaN if there is none."""
        if "best" in self.summary:
            return number(self.summary["best"])
        values = [
            v
            for v in curves(self.evaluations, "metrics").get(self.metric, ([], []))[1]
            if math.isfinite(v)
        ]
        return (max(values) if self.higher_is_better else min(values)) if values else math.nan

    @property
    def steps(self) -> int:
        """Steps done."""
        last = max((whole(line.get("step")) for line in self.train), default=0)
        return whole(self.summary.get("steps")) or last

    @property
    def test_samples(self) -> int:
        """Samples of the test set; 0 if the run did not record it."""
        count = number(self.summary.get("test_samples"))
        return int(count) if count > 0 else 0

    @property
    def test_set(self) -> str:
        """A hash of the test set's samples at the last evaluation; "" if the run did not record it."""
        return str(self.evaluations[-1].get("test_set") or "") if self.evaluations else ""

    @property
    def is_on_gpu(self) -> bool:
        """Whether memory was measured by a GPU's allocator, whose `kind` is the device's."""
        return self.memory.get("kind") not in (None, *MEASURED_ON_CPU)

    @property
    def step_seconds(self) -> float:
        """Median seconds per step."""
        # A GPU's steps end after the call returns; only the logged windows end with a synchronisation.
        if self.is_on_gpu and len(self.train) > 2:
            return finite_median([number(line.get("step_seconds")) for line in self.train[1:]])
        return self.figure("median_step_seconds", "step_seconds")

    @property
    def samples_per_second(self) -> float:
        """Throughput of training."""
        if self.is_on_gpu and len(self.train) > 2:
            return finite_median(
                [number(line.get("samples_per_second")) for line in self.train[1:]]
            )
        return self.figure("samples_per_second", "samples_per_second")

    @property
    def device_use(self) -> tuple[float, str]:
        """The mean share of sampled periods in which the device was busy, NaN if none was, and the reason for that."""
        entry = section(self.summary, "device_utilization")
        samples = [
            number(line["device_utilization"])
            for line in self.train
            if "device_utilization" in line
        ]
        if entry.get("mean") is None and samples:
            return math.fsum(samples) / len(samples), ""
        return number(entry.get("mean")), str(entry.get("not_measured", ""))

    @property
    def at_a_time(self) -> int:
        """How many runs of a comparison shared the processor with this one, itself included."""
        resumes = self.environment.get("resumes")
        starts = [self.environment, *(resumes if isinstance(resumes, list) else [])]
        counts = [
            number(section(start, "variables").get(SIDE_BY_SIDE), 1.0)
            for start in starts
            if isinstance(start, Mapping)
        ]
        return int(max([1.0, *(count for count in counts if math.isfinite(count))]))

    @property
    def memory(self) -> Mapping[str, Any]:
        """Peak memory and its split in bytes, with `kind` saying how it was measured."""
        last: Mapping[str, Any] = next(
            (
                line["memory"]
                for line in reversed(self.train)
                if isinstance(line.get("memory"), dict)
            ),
            {},
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
        held = {whole(event.get("step")): str(event.get("message", "")) for event in changes}
        return sorted(held.items())

    @property
    def failure(self) -> str:
        """The message of the event that ended the training, empty if it ended otherwise or went on since."""
        last = self.events[-1] if self.events else {}
        return str(last.get("message", "")) if last.get("kind") in ENDS else ""

    @property
    def not_planned(self) -> str:
        """Why the plan is of other steps than those that were taken; empty if it is of the same."""
        if adapted := section(self.summary, "adapted"):
            changes = ", ".join(f"memory.{name}={value}" for name, value in adapted.items())
            return f"it is of the settings that the run began with, which ran out of memory; since then {changes}"
        phase = re.match(r"phase ([^,]+),", str(self.plan.get("moment", "")))
        trained = {name.split("/")[0] for line in self.train for name in section(line, "losses")}
        if phase and trained and phase[1] not in trained:
            return f"its peak is in phase {phase[1]}, which has not begun"
        return ""

    @property
    def planned(self) -> list[Planned]:
        """The planned peaks that there is a measurement for, taken of the same thing: the training's steps.

        A plan is of two steps, as the optimizer's states are there from the second on; a single one is not compared.
        """
        if self.plan.get("kind") != self.memory.get("kind") or self.steps < 2 or self.not_planned:
            return []
        pairs = [
            ("allocated", "peak_bytes", ("steps_peak_bytes", "peak_bytes")),
            ("reserved", "reserved_bytes", ("steps_reserved_bytes", "reserved_bytes")),
        ]
        found = []
        for name, in_plan, in_memory in pairs:
            measured = next(
                (number(self.memory[key]) for key in in_memory if key in self.memory), math.nan
            )
            row = Planned(name, number(self.plan.get(in_plan)), measured)
            if math.isfinite(row.error):
                found.append(row)
        return found

    @property
    def skipped(self) -> dict[str, int]:
        """Phase -> optimizer steps left out after an overflow."""
        counts = section(self.summary, "skipped") or (
            section(self.train[-1], "skipped") if self.train else {}
        )
        return {str(phase): whole(count) for phase, count in counts.items()}

    def figure(self, in_summary: str, in_lines: str) -> float:
        """Return a figure of the summary or, without one, the median of the training lines."""
        # a summary that was written after a kill has no step times
        if self.summary.get(in_summary) is not None:
            return number(self.summary[in_summary])
        return finite_median([number(line.get(in_lines)) for line in self.train])
