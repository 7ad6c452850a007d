"""Which of a run's checkpoints is used when the weights are wanted, not the training: the best, the newest or a step's.

A resume always takes the newest. Everything that uses the weights takes the best by the task's metric, if evaluations
were made at steps that have a checkpoint.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from mpt.errors import CheckpointError, ConfigError
from mpt.run.checkpoints.checkpoint import LoadedCheckpoint, load
from mpt.run.checkpoints.retention import find_best, list_steps
from mpt.run.records.layout import RunDirectory, raise_missing_checkpoint

Wanted = Literal["best", "newest"] | int | None
"""A user's choice; an int is a step, None the best if there is one."""


def read_wish(*, best: bool, newest: bool, step: int | None) -> Wanted:
    """Return the checkpoint that --best, --newest and --step ask for. Raises ConfigError for two of them."""
    asked = {"--best": best, "--newest": newest, "--step": step is not None}
    given = [name for name, is_given in asked.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} name different checkpoints: give one of them.")
    return "best" if best else "newest" if newest else step


def load_wanted(run: RunDirectory, wanted: Wanted, metric: str) -> tuple[LoadedCheckpoint, str]:
    """Return a run's checkpoint, and a clause about which one it is. `metric` names the figure in it.

    A damaged best checkpoint is passed over for the newest whole one, and the notes say so; a step that was asked for
    is never replaced. Raises CheckpointError.
    """
    if isinstance(wanted, int):
        return load_step(run, wanted, metric)
    best = find_best(run)
    if wanted == "best" and best is None:
        raise CheckpointError(
            f"{run.path}: none of its checkpoints has a metric, so none is best. train.evaluate_every says how often a "
            "run is evaluated; leave out --best for the newest."
        )
    if wanted == "newest" or best is None:
        loaded = load(run)
        return loaded, f"step {loaded.step}, the newest checkpoint{figure_of(loaded, metric)}"
    try:
        loaded = load(best.path)
    except CheckpointError as error:
        loaded = load(run)
        note = f"the best checkpoint is passed over: {error}"
        passed_over = dataclasses.replace(loaded, notes=[note, *loaded.notes])
        return (
            passed_over,
            f"step {loaded.step}, the newest whole checkpoint{figure_of(loaded, metric)}",
        )
    words = f"step {best.step}, the best checkpoint{figure_of(loaded, metric)}"
    newest = max(list_steps(run))
    return loaded, words if newest == best.step else f"{words}; --newest takes step {newest}"


def load_step(run: RunDirectory, step: int, metric: str) -> tuple[LoadedCheckpoint, str]:
    """Return the checkpoint of a step, and a clause about it."""
    path = run.checkpoint_path(step)
    if not path.is_dir():
        raise_missing_checkpoint(path)
    loaded = load(path)
    return loaded, f"step {step}, as asked for{figure_of(loaded, metric)}"


def figure_of(loaded: LoadedCheckpoint, metric: str) -> str:
    """Return the metric that a checkpoint was saved with, in brackets; nothing if it has none."""
    value = loaded.manifest.get("metric")
    return f" ({metric} {value:.4g})" if isinstance(value, int | float) else ""
