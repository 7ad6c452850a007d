"""`mpt infer --half`: the same inputs in float32 and with half weights, what half gained and how far it is from
float32.

The two runs are built one after the other, so that neither is measured in the other's memory. Written alongside the
results as `half.md` and `half.json`.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mpt import accelerator
from mpt.config.checking.precision_names import FLOAT32
from mpt.config.text.messages import few
from mpt.data.loading.absent import AbsentDataset
from mpt.engine.state.evaluation import evaluate
from mpt.inference.half import awkward_dimensions, choose_half, rebuild, rebuild_half, watch_calls
from mpt.inference.inputs import Decoded, Inputs, Sample, infer_one, needs_inputs, read_inputs
from mpt.inference.measurement import (
    Distance,
    Latency,
    measure_distance,
    measure_latency,
    measure_peak,
    stored_bytes,
)
from mpt.inference.proof import prove_folding
from mpt.inference.results import on_host
from mpt.inference.trained import Trained
from mpt.report.units import show_bytes, show_figure, show_ratio, show_seconds
from mpt.run.process.files import write_atomically
from mpt.seams import HoldsWeights, Inference, Run

NAMED_LAYERS = 5


@dataclass(frozen=True)
class Measured:
    """One precision's figures."""

    name: str
    stored_bytes: int
    peak_bytes: int
    latency: Latency
    metric: float
    """On the whole test set, for tasks that name its samples; NaN for those that make samples."""


@dataclass(frozen=True)
class Statement:
    """What is said about half."""

    choice: str
    full: Measured
    half: Measured
    distance: Distance | None
    metric_name: str
    awkward: Sequence[str]


def infer_half(
    trained: Trained,
    samples: Sequence[Sample],
    batch_size: int,
    count: int,
    dtype: str | None,
    output: Path,
) -> tuple[list[Inference], Statement]:
    """Infer in float32 and in half, write what differs, and return the results in half and the statement."""
    choice = choose_half(dtype, trained.run.device)
    decoded = Decoded()
    folded = dataclasses.replace(trained, run=rebuild(trained, FLOAT32))
    check_folding(
        trained, folded.run, next(iter(read_inputs(trained, samples, batch_size, count, decoded)))
    )
    full, full_results, _ = measure(folded, "float32", samples, batch_size, count, decoded)
    del folded
    release(trained.run.device)
    half_run = rebuild_half(trained, choice.dtype)
    half_trained = dataclasses.replace(trained, run=half_run)
    half, results, awkward = measure(
        half_trained, choice.dtype, samples, batch_size, count, decoded
    )
    statement = Statement(
        choice.statement,
        full,
        half,
        measure_distance(full_results, results),
        trained.run.task.metric,
        awkward,
    )
    write_atomically(
        output / "half.md", "\n".join([*table_lines(statement), "", *sentences(statement)]) + "\n"
    )
    write_atomically(
        output / "half.json", json.dumps(as_json(statement), indent=1, allow_nan=False) + "\n"
    )
    return results, statement


def check_folding(trained: Trained, folded: Run, inputs: Inputs) -> None:
    """Raise CheckpointError if adapters folded into a run's weights do not compute what they did alongside them."""
    if not any(isinstance(trick, HoldsWeights) for trick in folded.tricks):
        return
    unfolded = dataclasses.replace(trained, run=rebuild(trained, FLOAT32, folds=False))
    with watch_calls(unfolded.run.task.modules) as called:
        infer_one(unfolded, inputs)
    prove_folding(called, folded.task.modules)


def measure(
    trained: Trained,
    name: str,
    samples: Sequence[Sample],
    batch_size: int,
    count: int,
    decoded: Decoded,
) -> tuple[Measured, list[Inference], list[str]]:
    """Infer all inputs and measure size, memory, latency and metric; also name layers of awkward sizes."""
    run = trained.run
    inputs = read_inputs(trained, samples, batch_size, count, decoded)
    first = next(inputs)  # of the others only the result is kept
    with watch_calls(run.task.modules) as called:
        results = [on_host(infer_one(trained, one)) for one in itertools.chain([first], inputs)]
    used = {key: module for key, (module, _, _) in called.items()}
    peak = measure_peak(lambda: infer_one(trained, first), run)
    latency = measure_latency(lambda: infer_one(trained, first), run.device)
    metric = math.nan
    if needs_inputs(run.task) and not isinstance(trained.test_data, AbsentDataset):
        metric = evaluate(run, trained.test_data, trained.config.train.batch_size)[run.task.metric]
    return (
        Measured(name, stored_bytes(used), peak, latency, metric),
        results,
        awkward_dimensions(used),
    )


def release(device: torch.device) -> None:
    """Let go of what the first precision held. On a CPU no GPU is touched: it may be full, or another's."""
    gc.collect()
    accelerator.synchronize(device)
    accelerator.empty_cache(device)


def rows_of(statement: Statement) -> list[tuple[str, str, str, str]]:
    """Return the table's rows: what, in float32, in half, ratio."""
    full, half = statement.full, statement.half
    sizes = [full.stored_bytes, half.stored_bytes, full.peak_bytes, half.peak_bytes]
    rows = [
        (
            "size on disk",
            show_bytes(full.stored_bytes, sizes),
            show_bytes(half.stored_bytes, sizes),
            half.stored_bytes / full.stored_bytes,
        ),
        (
            "peak memory",
            show_bytes(full.peak_bytes, sizes),
            show_bytes(half.peak_bytes, sizes),
            half.peak_bytes / max(full.peak_bytes, 1),
        ),
        (
            "latency, median",
            show_seconds(full.latency.median_seconds),
            show_seconds(half.latency.median_seconds),
            half.latency.median_seconds / full.latency.median_seconds,
        ),
        (
            "latency, p95",
            show_seconds(full.latency.p95_seconds),
            show_seconds(half.latency.p95_seconds),
            half.latency.p95_seconds / full.latency.p95_seconds,
        ),
    ]
    if math.isfinite(full.metric):
        ratio = half.metric / full.metric if full.metric else math.nan
        rows.append(
            (statement.metric_name, show_figure(full.metric), show_figure(half.metric), ratio)
        )
    return [(what, before, after, show_ratio(ratio)) for what, before, after, ratio in rows]


def table_lines(statement: Statement) -> list[str]:
    """Return the table as Markdown."""
    lines = [f"| | {statement.full.name} | {statement.half.name} | ratio |", "|---|---:|---:|---:|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows_of(statement)]


def sentences(statement: Statement) -> list[str]:
    """Return further remarks, a sentence each."""
    said = [statement.choice]
    distance = statement.distance
    if distance is not None:
        text = (
            f"Distance from float32 on the same input: max {show_figure(distance.max_error)}, mean "
            f"{show_figure(distance.mean_error)} ({distance.relative_error * 100:.2g} % of the mean output)"
        )
        if distance.agreement is not None:
            text += f"; {distance.agreement * 100:.4g} % of {distance.decisions} decisions agree"
        said.append(text + ".")
        if not distance.finite:
            said.append(
                "warning: half gave NaN or infinity where float32 did not: name the layers in precision.keep_fp32, or "
                "try --dtype bfloat16."
            )
    if statement.awkward:
        named = few(statement.awkward, NAMED_LAYERS)
        said.append(
            f"warning: dimensions that are no multiple of 8 are padded or slow on tensor cores: {named}. A network's "
            "first and last layer can rarely help it."
        )
    return said


def as_json(statement: Statement) -> dict[str, Any]:
    """Return the statement as plain data; values that are not finite become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return list(value) if isinstance(value, tuple) else value

    content: dict[str, Any] = plain(asdict(statement))
    return content
