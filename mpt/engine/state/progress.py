"""How far a training is: its counters, saved with every checkpoint and put back at a resume."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from mpt.config.periods import in_steps
from mpt.config.schema import Train
from mpt.engine.state.early_stopping import Waiting
from mpt.engine.step.step import Update
from mpt.parallel.world import ALONE, World


def due(step: int, every: int) -> bool:
    """Return whether something that is done every that many steps is done at this one; 0 is never."""
    return every > 0 and step % every == 0


def next_due(step: int, periods: Iterable[int], end: int) -> int:
    """Return the first step after this one at which something is due that is done every that many steps, or the end."""
    return min((step - step % every + every for every in periods if every > 0), default=end)


@dataclass(frozen=True)
class Periods:
    """Steps between two evaluations, sample grids and checkpoints of a training; 0 is at its end only."""

    evaluate: int
    sample: int
    checkpoint: int

    @classmethod
    def of(cls, train: Train, total_steps: int, steps_per_epoch: int) -> Periods:
        """Return the written periods in steps."""
        written = (train.evaluate_every, train.sample_every, train.checkpoint_every)
        return cls(
            *(
                in_steps(one, total_steps, steps_per_epoch, train.epochs is not None)
                for one in written
            )
        )


@dataclass
class Progress:
    """The counters of a training. Losses are summed on the device until a line is logged."""

    step: int = 0
    seconds_before: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    logged: dict[str, Tensor] = field(default_factory=dict)
    """Sums of the values that tasks and networks logged (`mpt.seams.log`), and the number of their elements."""
    logged_counts: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    best: float | None = None
    best_step: int = 0
    last_metrics: dict[str, float] = field(default_factory=dict)
    owed_step: int | None = None
    """The step whose evaluation has begun and not ended; a resume from there begins with it."""
    waiting: Waiting = field(default_factory=Waiting)
    """The record of early stopping."""
    scales_seen: dict[str, float] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    """On a CPU, the largest peak of the tracked steps and its split."""
    unmeasured: set[str] = field(default_factory=set)
    """Phases of which no step was tracked yet."""

    @property
    def seconds(self) -> float:
        """Wall seconds of training so far, over all resumes."""
        return self.seconds_before + time.perf_counter() - self.started

    @property
    def owes_evaluation(self) -> bool:
        """Did the evaluation of this step begin and not end?"""
        return self.owed_step == self.step

    def add_losses(self, phase: str, done: Update) -> None:
        sums = self.sums
        for name, value in done.losses.items():
            key = f"{phase}/{name}"
            sums[key] = sums[key] + value if key in sums else value
            self.counts[key] += 1

    def add_figures(self, phase: str, done: Update) -> None:
        for name, value in done.figures.sums.items():
            key = f"{phase}/{name}"
            self.logged[key] = self.logged[key] + value if key in self.logged else value
            self.logged_counts[key] = self.logged_counts.get(key, 0) + done.figures.counts[name]

    def add_figures_over_ranks(self, world: World) -> None:
        """Give the first rank the values that all have logged."""
        sums = world.add(self.logged)
        counts = world.collect(self.logged_counts)
        is_first = world.is_first
        self.logged = sums if is_first else {}
        self.logged_counts = (
            {name: sum(one.get(name, 0) for one in counts) for name in sums} if is_first else {}
        )

    def take_figures(self, world: World = ALONE) -> dict[str, float]:
        """Return the means of the values logged since the last call, on the first rank. Waits for the device."""
        if world.size > 1:
            self.add_figures_over_ranks(world)
        means = {
            name: float(value) / self.logged_counts[name] for name, value in self.logged.items()
        }
        self.logged, self.logged_counts = {}, {}
        return means

    def add_over_ranks(self, world: World) -> None:
        """Let the first rank have the losses of all of them; each has added up its share."""
        if world.size > 1:
            sums = world.add(self.sums)
            counts = world.collect(dict(self.counts))
            self.counts = defaultdict(
                int, {name: max(one.get(name, 0) for one in counts) for name in sums}
            )
            is_first = world.is_first
            self.sums = {
                name: one if is_first else torch.zeros_like(one) for name, one in sums.items()
            }

    def take_means(self, world: World = ALONE) -> dict[str, float]:
        """Return the mean losses since the last call, the same on all ranks. Waits for the device."""
        if world.size > 1:
            self.add_over_ranks(world)
            self.sums = world.add(self.sums)
        means = {name: float(value) / self.counts[name] for name, value in self.sums.items()}
        self.sums, self.counts = {}, defaultdict(int)
        return means

    def note_figure(self, figure: float, higher_is_better: bool) -> None:
        """Remember an evaluation's deciding figure if it is the best."""
        if not math.isfinite(figure):
            return
        if self.best is None or (figure > self.best if higher_is_better else figure < self.best):
            self.best, self.best_step = figure, self.step

    def to_record(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "seconds": self.seconds,
            "skipped": dict(self.skipped),
            "sums": self.sums,
            "counts": dict(self.counts),
            "logged": dict(self.logged),
            "logged_counts": dict(self.logged_counts),
            "best": self.best,
            "best_step": self.best_step,
            "last_metrics": self.last_metrics,
            "owed_step": self.owed_step,
            "waiting": asdict(self.waiting),
            "scales_seen": dict(self.scales_seen),
            "memory": self.memory,
            "unmeasured": sorted(self.unmeasured),
        }

    def restore(
        self, record: Mapping[str, Any], device: torch.device, world: World = ALONE
    ) -> None:
        """Restore the result of `to_record`. The sums, which are of all ranks, are the first one's to continue
        with."""
        self.step, self.seconds_before = record["step"], record["seconds"]
        self.started = time.perf_counter()
        self.skipped = {**self.skipped, **record["skipped"]}
        self.sums = (
            {name: value.to(device) for name, value in record["sums"].items()}
            if world.is_first
            else {}
        )
        self.counts = defaultdict(int, record["counts"])
        logged = record.get("logged", {}) if world.is_first else {}
        self.logged = {name: value.to(device) for name, value in logged.items()}
        self.logged_counts = dict(record.get("logged_counts", {})) if world.is_first else {}
        self.best, self.best_step = record["best"], record["best_step"]
        self.last_metrics = dict(record["last_metrics"])
        self.owed_step = record.get("owed_step")
        # a run from before early stopping begins to wait
        self.waiting = Waiting(**record.get("waiting", {}))
        self.scales_seen = dict(record["scales_seen"])
        self.memory, self.unmeasured = dict(record["memory"]), set(record.get("unmeasured", ()))
