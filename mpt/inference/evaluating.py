"""A finished run or an export measured on a whole test set, in one precision or in two.

The figures are the task's own, those of its settings and every further metric that can be computed of the same outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mpt.config.checking.precision_names import FLOAT32
from mpt.data.loading.fingerprint import Fingerprint, combine
from mpt.engine.state.evaluation import (
    apart_from_training,
    casts_kept,
    conclude,
    counted_batches,
    gather_evidence,
    is_counted,
    test_batches,
)
from mpt.errors import ConfigError
from mpt.inference.exported import networks_in, read_about, refuse_absent_networks
from mpt.inference.half import choose_half, rebuild, rebuild_half
from mpt.inference.trained import Trained
from mpt.metrics.shared.choice import measure_possible, metrics_of
from mpt.seams import Dataset, Exports, Run


@dataclass(frozen=True)
class Measured:
    """The figures of a run in one precision."""

    precision: str
    figures: Mapping[str, float]
    refused: Mapping[str, str]
    """Metric -> why it could not be computed."""
    details: Mapping[str, Any]
    """Further findings of the task (`Task.details`)."""
    test_set: str = ""
    """A hash of the samples (`mpt.data.loading.fingerprint`)."""


def measure(run: Run, data: Dataset, batch_size: int, precision: str) -> Measured:
    """Return the figures on all samples of a data set."""
    size, fingerprint = min(batch_size, len(data)), Fingerprint()
    with apart_from_training(run), casts_kept(run):
        counts, batches = counted_batches(data, size), test_batches(run, data, size, fingerprint)
        evidence = [
            found
            for at, found in gather_evidence(run, batches, size)
            if is_counted(run, at, counts)
        ]
        figures = conclude(run, evidence)
    more, refused = measure_possible(
        evidence, set(figures) - set(metrics_of(run.config.task.settings))
    )
    test_set = combine([fingerprint.value])
    return Measured(precision, {**figures, **more}, refused, dict(run.task.details or {}), test_set)


def measure_trained(trained: Trained, data: Dataset, batch_size: int) -> Measured:
    """Measure a run as it was trained, or an export as it is."""
    if not trained.loaded.path.is_file():
        return measure(trained.run, data, batch_size, trained.config.precision.mode)
    stored = trained.loaded.manifest.get("dtype") or trained.config.precision.mode
    return of_export(trained.run, measure(trained.run, data, batch_size, stored))


def of_export(run: Run, found: Measured) -> Measured:
    """Return the figures without those of the training's state, which an exported file does not hold."""
    left_out = run.task.training_figures if isinstance(run.task, Exports) else ()
    kept = {name: value for name, value in found.figures.items() if name not in left_out}
    return replace(found, figures=kept)


def measure_in_half(
    trained: Trained, data: Dataset, batch_size: int, dtype: str | None
) -> list[Measured]:
    """Measure a run, or an export's weights, in float32 and with weights in half."""
    path = trained.loaded.path
    if path.suffix == ".onnx":
        raise ConfigError(
            f"--half: {path} computes in the dtype that it was written in. `mpt convert RUN --to onnx --half` writes a "
            "file in half, to be evaluated without --half."
        )
    choice = choose_half(dtype, trained.run.device)
    runs = {"float32": rebuild(trained, FLOAT32), choice.dtype: rebuild_half(trained, choice.dtype)}
    if not path.is_file():
        return [measure(run, data, batch_size, name) for name, run in runs.items()]
    there = networks_in(read_about(path))
    for run in runs.values():
        refuse_absent_networks(path, run.task, there)
    return [of_export(run, measure(run, data, batch_size, name)) for name, run in runs.items()]
