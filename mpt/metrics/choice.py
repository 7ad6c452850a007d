"""Further figures of a classifier by name: a file in `metrics/` with `measure(logits, labels)` is a metric.

The file's name is what `task.metrics` says in YAML. Only files in that folder of a part package are looked for, so a
name imports nothing else. Generators have no such list: their figures are those of `mpt.tasks.samples`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mpt.config.registry import INSTALLED
from mpt.errors import ConfigError

Measure = Callable[[Tensor, Tensor], float]
"""Float32 logits (n, classes) and labels (n,) of the whole test set to one number."""


def find_metrics(names: Sequence[str]) -> dict[str, Measure]:
    """Return the metrics of these names. Raises ConfigError for a name without a file."""
    known = INSTALLED.functions("metrics") if names else {}
    for name in names:
        if name not in known:
            raise ConfigError(f"task.metrics: no metric {name!r}; there are {', '.join(known)}")
    return {name: known[name].member("measure") for name in names}
