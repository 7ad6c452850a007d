"""When a training is over before its last step: after that many evaluations without a better figure.

The best figure so far is part of the progress, so it is saved with each checkpoint and goes back with a rollback.
Whether to stop is worked out from it and the settings, never saved: a resume with more patience trains on. All ranks
get the same figures from an evaluation, so they decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from mpt.config.schema import EarlyStopping
from mpt.errors import ConfigError
from mpt.seams import Task


@dataclass
class Waiting:
    """The best figure so far and how many evaluations have passed since it."""

    best: float | None = None
    best_step: int = 0
    evaluations: int = 0


class Rule:
    """The settings applied to one task. Raises ConfigError for a metric without a direction."""

    def __init__(self, settings: EarlyStopping, task: Task) -> None:
        self.settings, self.metric = settings, settings.metric or task.metric
        if settings.mode == "auto" and self.metric != task.metric:
            raise ConfigError(
                f"train.early_stopping.mode: auto knows the direction of {task.metric} alone; say whether "
                f"{self.metric} should go to its min or max"
            )
        self.higher = task.higher_is_better if settings.mode == "auto" else settings.mode == "max"

    def observe(self, waiting: Waiting, figures: Mapping[str, float], step: int) -> None:
        """Take an evaluation into account. One that is NaN is no improvement."""
        if self.metric not in figures:
            near = get_close_matches(self.metric, figures, n=1, cutoff=0.5)
            raise ConfigError(
                f"train.early_stopping.metric: an evaluation has no {self.metric!r}"
                + (f"; did you mean {near[0]}?" if near else "")
                + f" There are {', '.join(figures)}"
            )
        figure, least = figures[self.metric], self.settings.min_delta
        gain = (
            None
            if waiting.best is None
            else figure - waiting.best
            if self.higher
            else waiting.best - figure
        )
        if figure == figure and (gain is None or gain > least):
            waiting.best, waiting.best_step, waiting.evaluations = figure, step, 0
        else:
            waiting.evaluations += 1

    def is_over(self, waiting: Waiting) -> bool:
        """Has the patience run out?"""
        return waiting.evaluations >= self.settings.patience

    def explain(self, waiting: Waiting) -> str:
        """Return in words why the training is over."""
        times = f"{waiting.evaluations} evaluation{'s' if waiting.evaluations > 1 else ''}"
        if waiting.best is None:
            return f"{self.metric} was no number in {times}"
        least = f" by more than {self.settings.min_delta:g}" if self.settings.min_delta else ""
        return (
            f"{self.metric} was {waiting.best:.4g} at step {waiting.best_step}, and no "
            f"better{least} in {times} since"
        )
