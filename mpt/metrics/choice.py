"""Further figures of a classifier by name: a file in this folder with `measure(logits, labels)` is a metric.

The file's name is what `task.metrics` says in YAML. Only files of this folder are looked for, so a name imports nothing
else. Generators have no such list: their figures are those of `mpt.tasks.samples`.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from mpt.errors import ConfigError

Measure = Callable[[Tensor, Tensor], float]
"""Float32 logits (n, classes) and labels (n,) of the whole test set to one number."""


def metric_names() -> list[str]:
    """Return the names that `task.metrics` may hold, sorted, from the sources alone."""
    files = Path(__file__).parent.glob("*.py")
    return sorted(path.stem for path in files if _declares_measure(path.read_text("utf-8")))


def find_metrics(names: Sequence[str]) -> dict[str, Measure]:
    """Return the metrics of these names. Raises ConfigError for a name without a file."""
    known = metric_names()
    for name in names:
        if name not in known:
            raise ConfigError(f"task.metrics: no metric {name!r}; there are {', '.join(known)}")
    return {name: importlib.import_module(f"mpt.metrics.{name}").measure for name in names}


def _declares_measure(source: str) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == "measure" for node in ast.parse(source).body)
