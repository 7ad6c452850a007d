"""A detector's ONNX file in float16 or in 8 bits, and its cost: mAP on the run's test set compared with
float32's.

8 bits are ONNX Runtime's static quantisation (QDQ, per channel, symmetric weights), of the convolutions only: decoding
keeps float32, since a quarter of a pixel counts.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpt.data.loading.absent import AbsentDataset
from mpt.data.loading.loader import to_device
from mpt.engine.state.evaluation import without_bad
from mpt.errors import DataError, GateError
from mpt.inference.export import as_half_network
from mpt.inference.graphs.eight_bits import quantise_file
from mpt.inference.graphs.files import open_graph
from mpt.inference.trained import Trained
from mpt.seams import Batch, Dataset, Run
from mpt.systems.yolofuse.commands.shared.onnx_file import (
    STACKED,
    Interface,
    call,
    write_plain,
)
from mpt.systems.yolofuse.metrics.shared.suppression import Suppression
from mpt.systems.yolofuse.tasks.detect import Detect
from mpt.systems.yolofuse.tasks.shared.decoded import decoded_outputs

TEST_BATCH = 8


def write_half(path: Path, network: nn.Module, names: Interface, pictures: list[Tensor]) -> None:
    """Replace a file by one with weights and arithmetic in float16, its inputs and outputs in float32."""
    write_plain(path, as_half_network(network, torch.float16), names, pictures)


def quantise(
    path: Path, names: Interface, trained: Trained, run: Run, task: Detect, count: int
) -> None:
    """Replace a file by its 8-bit version, calibrated on `count` training samples."""
    prepared, finished = (
        path.with_name(f"{path.name}.prepared"),
        path.with_name(f"{path.name}.int8"),
    )
    samples = batches(run, trained.train_data, min(count, len(trained.train_data)), 1)
    feeds = (named_feeds(batch, names, task) for batch in samples)
    try:
        importlib.import_module("onnxruntime.quantization.shape_inference").quant_pre_process(
            str(path), str(prepared), skip_symbolic_shape=True
        )
        quantise_file(prepared, finished, feeds, ["Conv"])
        os.replace(finished, path)
    finally:
        for leftover in (prepared, finished):
            leftover.unlink(missing_ok=True)
    print(f"calibrated on {min(count, len(trained.train_data))} training samples")


@dataclass(frozen=True)
class Measured:
    """A file's size and figures on the test set."""

    size_bytes: int
    figures: Mapping[str, float]


def measured(path: Path, names: Interface, trained: Trained, run: Run, task: Detect) -> Measured:
    """Return a file's size, mAP on the run's test set and milliseconds per sample."""
    return Measured(
        path.stat().st_size, measure_file(open_graph(path), names, run, task, trained.test_data)
    )


def compare_measured(
    before: Measured, after: Measured, kind: str, samples: int, most_lost: float
) -> None:
    """Print a table of both. Raises GateError if mAP50 or mAP50-95 has fallen by more than `most_lost`."""
    print(f"{samples} test samples:\n| | float32 | {kind} |\n|---|---:|---:|")
    print(f"| file, MiB | {before.size_bytes / 2**20:.2f} | {after.size_bytes / 2**20:.2f} |")
    for name, label in (
        ("map50", "mAP50"),
        ("map50_95", "mAP50-95"),
        ("milliseconds", "ms per sample, CPU"),
    ):
        print(f"| {label} | {before.figures[name]:.4f} | {after.figures[name]:.4f} |")
    for name, label in (("map50", "mAP50"), ("map50_95", "mAP50-95")):
        lost = before.figures[name] - after.figures[name]
        if lost > most_lost:
            raise GateError(
                f"{kind} loses {lost:.4f} of {label}, and --gate allows {most_lost:g}; the file was not kept. Allow "
                "more, or calibrate on more samples"
            )


def require_data(trained: Trained, option: str) -> None:
    """Raise DataError without the data that an export in fewer bits is measured on."""
    for data in (trained.train_data, trained.test_data):
        if isinstance(data, AbsentDataset):
            raise DataError(
                f"{option} needs the run's data set, to calibrate and to measure; it is not here"
            )


def feeds_of(pictures: list[Tensor], names: Interface) -> list[Tensor]:
    """Return the cameras' pictures as a file takes them."""
    return [torch.cat(pictures, 1)] if names is STACKED else pictures


def named_feeds(batch: Batch, names: Interface, task: Detect) -> dict[str, Any]:
    """Return a batch's pictures by the names of a file's inputs."""
    return {
        name: one.numpy()
        for name, one in zip(names.inputs, feeds_of(task.pictures(batch), names), strict=True)
    }


def batches(run: Run, data: Dataset, count: int, size: int) -> Iterator[Batch]:
    """Yield `count` samples without changes by chance, spread over the data set."""
    changes = getattr(data, "changes", None)
    step = max(1, len(data) // count)
    try:
        if changes is not None:
            data.changes = None  # type: ignore[attr-defined]
        for start in range(0, count, size):
            indices = [number * step for number in range(start, min(start + size, count))]
            batch = data.fetch(indices, 0)
            if not all(map(data.is_left_out, indices)):
                yield to_device(without_bad(batch, data, indices), torch.device("cpu"), run.data)
    finally:
        if changes is not None:
            data.changes = changes  # type: ignore[attr-defined]


def measure_file(
    opened: Any, names: Interface, run: Run, task: Detect, data: Dataset
) -> dict[str, float]:
    """Return mAP of a file on a data set and the milliseconds per sample."""
    how = Suppression(0.001, 0.7, task.settings.agnostic, True, task.settings.most_detections)
    evidence, spent = [], 0.0

    def look(pictures: list[Tensor]) -> tuple[Tensor, Tensor]:
        nonlocal spent
        started = time.perf_counter()
        made = call(opened, names.inputs, feeds_of(pictures, names))
        spent += time.perf_counter() - started
        found = decoded_outputs([torch.from_numpy(one) for one in made], classes=len(task.classes))
        return found.boxes, found.scores

    for batch in batches(run, data, len(data), TEST_BATCH):
        found = task.chosen(*task.answer(look, batch), how, task.is_tiled(batch))
        evidence.append(task.evidence(batch, found))
    return {**task.conclude(evidence), "milliseconds": spent / len(data) * 1e3}
