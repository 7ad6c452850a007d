"""Further figures of any task by name: a file in `metrics/` with a function `measure` is a metric.

`task.metrics` has the file's name in YAML; a task has that setting as `metrics: tuple[MetricName, ...] = ()`.
The function's parameters are named after the task's outputs for each batch (`Task.evaluate_batch`): those of a
classifier are `measure(logits, labels)`; one with a default may have any name. It gets all batches' as one
tensor, on the CPU. Only files in that folder of a part package are looked for, so a name imports nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from mpt.config.finding.registry import INSTALLED
from mpt.errors import ConfigError, PartError
from mpt.outside.own_calls import place_of
from mpt.seams import Evidence, gather
from mpt.seams.members import article

Measure = Callable[..., float]
"""Tensors of the whole test set, by the names of the parameters, to one number."""


def metrics_of(settings: Any) -> dict[str, Measure]:
    """Return the metrics that a task's settings name. Raises ConfigError for a name without a file."""
    names: Sequence[str] = getattr(settings, "metrics", ())
    known = INSTALLED.functions("metrics") if names else {}
    for name in names:
        if name not in known:
            raise ConfigError(f"task.metrics: no metric {name!r}; there are {', '.join(known)}")
    return {name: known[name].member("measure") for name in names}


def measure_possible(
    evidence: Sequence[Evidence], taken: Collection[str] = ()
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the figures of every metric that there is, and why the others have none.

    A metric is left out if the evaluation does not keep its inputs, if its package is not installed, if it fails, and
    if its name is `taken` by a figure of the task.
    """
    kept = {name for one in evidence for name in one}
    figures: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, part in INSTALLED.functions("metrics").items():
        try:
            measure = part.member("measure")
            if kept >= set(needed(measure)):
                refuse_taken([name], taken)
                figures |= measure_all({name: measure}, evidence)
        except Exception as error:  # whatever a file of the user's raises, the others are measured
            refused[name] = str(error).partition("\n")[0] or type(error).__name__
    return figures, refused


def needed(measure: Measure) -> list[str]:
    """Return the outputs without which a metric cannot be called: its parameters that have no default."""
    parameters = inspect.signature(measure).parameters.values()
    return [one.name for one in parameters if one.default is one.empty]


def refuse_taken(names: Iterable[str], taken: Collection[str]) -> None:
    """Raise ConfigError for a metric whose name is that of a figure of the task: one would replace the other."""
    for name in names:
        if name in taken:
            raise ConfigError(
                f"task.metrics: the task has a figure named {name} of its own; rename the metric's file"
            )


def measure_all(metrics: Mapping[str, Measure], evidence: Sequence[Evidence]) -> dict[str, float]:
    """Return the figures. Raises ConfigError for a metric of outputs that the task's evaluation does not keep."""
    kept = list(dict.fromkeys(name for one in evidence for name in one))
    figures = {}
    for name, measure in metrics.items():
        missing = [field for field in needed(measure) if field not in kept]
        if missing:
            place = place_of(inspect.unwrap(measure))
            raise ConfigError(
                f"task.metrics: {name} ({place}) measures {', '.join(missing)}, which this task's "
                f"evaluation does not keep; it has {', '.join(kept)}"
            )
        wanted = [field for field in inspect.signature(measure).parameters if field in kept]
        made: Any = measure(**{field: gather(evidence, field) for field in wanted})
        try:
            figures[name] = float(made)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise PartError(
                f"metric {name}: its measure returned {article(made)}; expected one number"
            ) from error
    return figures
