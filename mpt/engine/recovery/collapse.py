"""Is a game between networks collapsing: judged by the variety of samples, the loss scales, and the ratio of losses.

Only tasks that say which of their phases play against each other (`Task.opponents`) are watched. Samples are of the
same latents at every look, made as previews are, so that watching changes no bit of the training. An observation counts
once it was seen at several looks in a row (`train.collapse.patience`), and not while a run is young.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mpt.config.schema import Collapse
from mpt.data.loading.loader import to_device
from mpt.engine.state.evaluation import inferring
from mpt.metrics.distances.diversity import diversity_ratio
from mpt.metrics.distances.feature_space import choose_feature_space
from mpt.seams import Dataset, Game, Run

SEED = 4321
"""Of the latents of the watched samples."""
HISTORY = 10
"""Looks of the ratio of losses before which it has no range of its own."""
ADVICE = {
    "alike": "try a lower optimizer.lr, above all the generator's (optimizer.phases.gen.lr), or a larger batch",
    "scale": "try a lower optimizer.lr, optimizer.clip_grad_norm, or precision=bf16; mpt doctor RUN names the operator",
    "ratio": "try a lower learning rate for the side whose loss falls (optimizer.phases)",
}


@dataclass
class Streak:
    """How often something was seen in a row."""

    length: int = 0

    def seen(self, now: bool) -> int:
        self.length = self.length + 1 if now else 0
        return self.length


@dataclass
class CollapseWatch:
    """Looks at a training now and then. It begins anew at a resume and after a rollback."""

    limits: Collapse
    opponents: tuple[str, str] | None
    """The phases of the discriminator and of the generator."""
    bounded: bool
    """Whether their losses are positive, so that one can be divided by the other."""
    floors: Mapping[str, float] = field(default_factory=dict)
    """Phase -> the smallest scale of its dynamic loss scale."""
    variety: float | None = None
    """How varied samples were at the last look, compared with the data."""
    ratios: list[float] = field(default_factory=list)
    """The logarithms of the discriminator's loss over the generator's, of all looks that were in range."""
    scales: dict[str, float] = field(default_factory=dict)
    streaks: dict[str, Streak] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    data: Tensor | None = None
    """The features of the data, made at the first look."""

    @classmethod
    def of(cls, run: Run) -> CollapseWatch:
        floor = run.config.precision.settings.min_scale
        floors = {name: floor for name, scaler in run.precision.scalers.items() if scaler.dynamic}
        if not isinstance(run.task, Game):
            return cls(run.config.train.collapse, None, False, floors)
        return cls(run.config.train.collapse, run.task.opponents, run.task.bounded_losses, floors)

    @property
    def every(self) -> int:
        """Return after how many steps samples are looked at again; 0 is never."""
        return self.limits.every if self.opponents is not None and self.limits.samples > 1 else 0

    @property
    def is_quiet(self) -> bool:
        return not any(streak.length for streak in self.streaks.values())

    def is_new(self, kind: str) -> bool:
        """Return whether this is the first time that a sign counts."""
        if kind in self.told:
            return False
        self.told.add(kind)
        return True

    def look_at_samples(self, run: Run, step: int, dataset: Dataset) -> dict[str, str]:
        """Measure how varied samples of the same latents are and return kind -> the faults with them."""
        variety: float = run.world.tell(self.measure(run, dataset))
        self.variety = variety
        if not self._streak("alike", variety < self.limits.diversity and step >= self.limits.after):
            return {}
        looks = f"at {self.limits.patience} looks in a row"
        return {"alike": f"the samples vary {variety:.2f} times as much as the data {looks}"}

    def measure(self, run: Run, dataset: Dataset) -> float:
        """Return the root of the total variance of the samples' features over the data's."""
        count = min(self.limits.samples, len(dataset))
        chunk = run.adaptation.micro_batch_size or run.config.train.batch_size
        parts = [(first, min(chunk, count - first)) for first in range(0, count, chunk)]
        space = choose_feature_space(run.data)

        def features(images: Iterable[Tensor]) -> Tensor:
            with run.precision.float32():
                return torch.cat([space.features(image.float()).cpu() for image in images])

        assert isinstance(run.task, Game)
        with inferring(run):
            if self.data is None:
                batches = (
                    dataset.fetch(list(range(first, first + size)), 0) for first, size in parts
                )
                self.data = features(
                    to_device(batch, run.device, run.data)["image"] for batch in batches
                )
            samples = features(run.task.samples(count, first, size, SEED) for first, size in parts)
        ratio = diversity_ratio(self.data, samples) if bool(torch.isfinite(samples).all()) else 0.0
        return ratio if math.isfinite(ratio) else 1.0  # data that do not vary say nothing

    def look_at_line(
        self, step: int, losses: Mapping[str, float], scales: Mapping[str, float]
    ) -> dict[str, str]:
        """Return kind -> fault by the mean losses since the last line, and by the loss scales."""
        if self.opponents is None or step < self.limits.after:
            return {}
        found = {}
        for phase, scale in scales.items():
            before, self.scales[phase] = self.scales.get(phase, scale), scale
            fell = self._streak(f"{phase} falls", scale < before)
            if self._streak(f"{phase} low", scale <= self.floors.get(phase, 0.0)) or fell:
                way = "has fallen" if fell else "has been at its floor"
                found["scale"] = (
                    f"{phase}: the loss scale {way} at {self.limits.patience} log lines in a row (now {scale:g})"
                )
        if (text := self.look_at_ratio(losses)) is not None:
            found["ratio"] = text
        return found

    def look_at_ratio(self, losses: Mapping[str, float]) -> str | None:
        """Return how the losses' ratio has left its own earlier range for long."""
        assert self.opponents is not None
        disc, gen = (
            sum(abs(value) for name, value in losses.items() if name.startswith(f"{phase}/"))
            for phase in self.opponents
        )
        if (
            not self.bounded
            or not self.limits.ratio
            or not (disc > 0 and gen > 0 and math.isfinite(disc + gen))
        ):
            return None
        ratio = math.log(disc / gen)
        if len(self.ratios) < HISTORY:
            self.ratios.append(ratio)
            return None
        room = math.log(self.limits.ratio)
        low, high = min(self.ratios), max(self.ratios)
        outside = not low - room <= ratio <= high + room
        if not outside:
            self.ratios.append(ratio)
        if not self._streak("ratio", outside):
            return None
        side = "discriminator's" if ratio < low else "generator's"
        return (
            f"the {side} loss has become small beside the other's: their ratio is {math.exp(ratio):.3g} and was "
            f"{math.exp(low):.3g} to {math.exp(high):.3g} until {self.limits.patience} log lines ago"
        )

    def _streak(self, name: str, now: bool) -> bool:
        return self.streaks.setdefault(name, Streak()).seen(now) >= self.limits.patience

    def to_record(self) -> dict[str, Any]:
        """Return its part of a log line."""
        return {} if self.variety is None else {"variety": self.variety}
