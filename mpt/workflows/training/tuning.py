"""Which way of computing the same step is fastest on this device: the optimizer's kernels, the order of channels.

Which of them wins depends on the card, the network and the batch, so it is measured: a run as configured and one with
a single setting changed take turns, a round of steps each, in changing order, so that other work of the machine meets
both. A ratio is the median over rounds of the ratio within a round; its interval, between the fifth smallest and the
fifth largest of 21, holds at any distribution of times. The settings that gain are joined and measured once more, since
the best of several is the luckiest too. Only settings that compute the same up to rounding are tried. A training never
does this alone: two ways that round differently would make a run depend on how busy the machine was when it began.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpt.accelerator import has_allocator, name_of, synchronize
from mpt.config.checking.layers import write_override
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.data.loading.loader import to_device
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.building.devices import choose_device
from mpt.engine.loop.assembly import supply_batches
from mpt.engine.step.faults import is_out_of_memory
from mpt.engine.step.step import update
from mpt.errors import MptError, NonFiniteError
from mpt.run.records.environment import processor_name
from mpt.seams import Batch, DataSpec, Run

ROUNDS, OUTSIDE = 21, 4
"""Rounds, and how many of their ratios lie on either side of the interval: it holds the median with 99.3 %."""
ROUND_SECONDS, MOST_STEPS = 0.1, 50
"""A round of each side has as many steps as take so long."""
WARM_UP, MOST_WARM_UP = 3, 30
"""Steps before the first round: some, and until a loss scale is found that does not overflow."""
LEAST_GAIN = 0.01
"""Share of a step's time that the interval's upper end has to be below 1 by."""

Clock = Callable[[], float]
Settings = Mapping[str, Any]
"""Dotted key -> value."""


@dataclass(frozen=True)
class Trial:
    """The result for some settings: a ratio to the step as configured with its interval, or why there is none."""

    settings: dict[str, Any]
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    reason: str = ""
    again: bool = False
    """Whether these are the settings that gained, measured once more."""

    @property
    def gains(self) -> bool:
        """Whether a step is faster by more than its times vary."""
        return self.high < 1 - LEAST_GAIN

    @property
    def interval(self) -> str:
        """The ratio with its interval, in words."""
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"

    @property
    def patch(self) -> dict[str, Any]:
        """The settings by section, as a patch has them."""
        patch: dict[str, Any] = {}
        for key, value in self.settings.items():
            section, name = key.split(".")
            patch.setdefault(section, {})[name] = value
        return patch

    def as_data(self) -> dict[str, Any]:
        """Return the trial as JSON has it."""
        times = {"ratio": self.ratio, "low": self.low, "high": self.high}
        found = {"reason": self.reason} if self.reason else times
        return {"settings": self.settings, **found, "gains": self.gains, "again": self.again}


@dataclass
class Tuning:
    """All trials of a configuration on a device."""

    device: torch.device
    step_seconds: float
    """As configured."""
    trials: list[Trial] = field(default_factory=list)

    @property
    def chosen(self) -> Trial | None:
        """The settings that gained twice; None if there are none."""
        return next((trial for trial in self.trials if trial.again and trial.gains), None)

    @property
    def device_name(self) -> str:
        """The name of the device that was measured."""
        return processor_name() if self.device.type == "cpu" else name_of(self.device)

    def as_data(self, written: Sequence[str]) -> dict[str, Any]:
        """Return all trials as JSON has them, and the files that were written of them."""
        return {
            "device": self.device_name,
            "step_seconds": self.step_seconds,
            "trials": [trial.as_data() for trial in self.trials],
            "chosen": self.chosen.settings if self.chosen is not None else {},
            "written": list(written),
        }


class Side:
    """A run that takes steps on the same few batches."""

    def __init__(
        self, config: Config, device: torch.device, data: DataSpec, batches: Sequence[Batch]
    ) -> None:
        self.run: Run = build_run(config, device, data)
        self.batches, self.steps, self.skipped = batches, 0, 0

    def take(self, count: int, clock: Clock) -> float:
        """Take some steps; return their seconds."""
        synchronize(self.run.device)
        started = clock()
        for _ in range(count):
            batch = self.batches[self.steps % len(self.batches)]
            for phase in self.run.phases:
                if phase.is_due(self.steps):
                    self.skipped += update(self.run, phase, batch).stats.skipped
            self.steps += 1
        synchronize(self.run.device)
        return clock() - started

    def warm_up(self, clock: Clock) -> float:
        """Take the first steps, until none is skipped; return the seconds of one. Raises NonFiniteError."""
        self.take(WARM_UP, clock)
        while self.steps < MOST_WARM_UP:
            before = self.skipped
            seconds = self.take(1, clock)
            if self.skipped == before:
                return seconds
        raise NonFiniteError(
            f"{self.skipped} of {self.steps} steps were skipped: losses or gradients are not finite"
        )


def tune(
    config: Config,
    clock: Clock | None = None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Tuning:
    """Measure every candidate of a configuration on its device.

    Without a `clock` it is the wall's; on a CPU with one thread the processor's, which other programs move less.
    Raises the errors of building and stepping the unchanged configuration.
    """
    device = choose_device(config.train.device)
    if clock is None:
        clock = (
            time.process_time
            if device.type == "cpu" and torch.get_num_threads() == 1
            else time.perf_counter
        )
    train_data, _ = build_datasets(config)
    stream = supply_batches(config, train_data).batches(0)
    batches = [to_device(next(stream), device, train_data.spec) for _ in range(2)]
    base = Side(config, device, train_data.spec, batches)
    seconds = base.warm_up(clock)
    tuning = Tuning(device, seconds)
    numbers = random.Random(config.seed)

    def attempt(settings: dict[str, Any], again: bool = False) -> Trial:
        overrides = [write_override(key, value) for key, value in settings.items()]
        try:
            changed = load_config(config.to_data(), overrides, allow=config.granted)
            other = Side(changed, device, train_data.spec, batches)
            other.warm_up(clock)
            count = min(MOST_STEPS, max(1, math.ceil(ROUND_SECONDS / max(seconds, 1e-9))))
            trial = Trial(settings, *ratio_of(other, base, count, clock, numbers), again=again)
        except (
            MptError,
            RuntimeError,
        ) as error:  # a kernel that is not there is a RuntimeError of torch's
            reason = (
                "no memory for it beside the other"
                if is_out_of_memory(error)
                else str(error).split("\n")[0]
            )
            trial = Trial(settings, reason=reason, again=again)
        tuning.trials.append(trial)
        on_trial(trial)
        return trial

    joined: dict[str, Any] = {}
    for group in candidates(config, base.run):
        gaining = [trial for trial in map(attempt, group) if trial.gains]
        if gaining:
            joined |= min(gaining, key=lambda trial: trial.ratio).settings
    if joined:
        attempt(joined, again=True)
    return tuning


def ratio_of(
    other: Side, base: Side, count: int, clock: Clock, numbers: random.Random
) -> tuple[float, float, float]:
    """Let two runs take turns; return the median of the ratios of their times, and the interval around it."""
    ratios = []
    for _ in range(ROUNDS):
        times = {side: side.take(count, clock) for side in numbers.sample((other, base), 2)}
        ratios.append(times[other] / max(times[base], 1e-12))
    ordered = sorted(ratios)
    outside = min(OUTSIDE, (ROUNDS - 1) // 2)
    return statistics.median(ordered), ordered[outside], ordered[-1 - outside]


def candidates(config: Config, run: Run) -> Iterator[list[dict[str, Any]]]:
    """Yield the settings to try, in groups of which one at most can be taken; none that the configuration sets."""
    optimizer = config.optimizer.settings.model_dump()
    defaults = run.phases[0].optimizer.defaults
    is_fused = bool(defaults.get("fused"))
    together = defaults.get("foreach")
    is_foreach = has_allocator(run.device) if together is None else bool(together)
    kernels: list[dict[str, Any]] = []
    if "fused" in optimizer and optimizer["fused"] is None and not optimizer["foreach"]:
        kernels.append({"optimizer.fused": not is_fused})
    if "foreach" in optimizer and optimizer["foreach"] is None and not is_fused:
        kernels.append({"optimizer.foreach": not is_foreach})
    if kernels:
        yield kernels
    convolves = any(
        weight.dim() in (4, 5)
        for module in run.task.modules.values()
        for weight in module.parameters()
    )
    if convolves and "channels_last" not in config.memory.tricks:
        yield [{"memory.channels_last": True}]
