"""Further figures of any task by name: a file in `metrics/` with a function `measure` is a metric.

`task.metrics` has the file's name in YAML; a task has that setting as `metrics: tuple[MetricName, ...] = ()`.
The function's parameters are named after the task's outputs for each batch (`Task.evaluate_batch`): those of a
classifier are `measure(logits, labels)`. It gets all batches' as one tensor, on the CPU. Only files in that folder of a
part package are looked for, so a name imports nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpt.config.registry import INSTALLED
from mpt.errors import ConfigError
from mpt.seams import Evidence, gather

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


def measure_possible(evidence: Sequence[Evidence]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the figures of every metric that there is, and why the others have none.

    A metric is left out if the evaluation does not keep its inputs, and if its package is not installed.
    """
    kept = {name for one in evidence for name in one}
    figures: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, part in INSTALLED.functions("metrics").items():
        try:
            measure = part.member("measure")
            if kept >= set(inspect.signature(measure).parameters):
                figures |= measure_all({name: measure}, evidence)
        except (ConfigError, ImportError, RuntimeError, ValueError) as error:
            refused[name] = str(error).partition("\n")[0]
    return figures, refused


def measure_all(metrics: Mapping[str, Measure], evidence: Sequence[Evidence]) -> dict[str, float]:
    """Return the figures. Raises ConfigError for a metric of outputs that the task's evaluation does not keep."""
    kept = list(dict.fromkeys(name for one in evidence for name in one))
    figures = {}
    for name, measure in metrics.items():
        wanted = list(inspect.signature(measure).parameters)
        missing = [field for field in wanted if field not in kept]
        if missing:
            raise ConfigError(
                f"task.metrics: {name} measures {', '.join(missing)}, which this task's evaluation does not keep; it "
                f"has {', '.join(kept)}"
            )
        figures[name] = float(measure(**{field: gather(evidence, field) for field in wanted}))
    return figures
