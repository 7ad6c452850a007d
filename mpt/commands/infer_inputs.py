"""What `mpt infer` infers from: image files, test samples, or nothing but a wish for samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mpt.data.decoding import EXTENSIONS, BadImageError, decode_image
from mpt.data.loader import to_device
from mpt.errors import DataError
from mpt.inference.trained import Trained
from mpt.seams import Batch, Inference

SAMPLES = 64
MAX_PIXELS = 100_000_000

Inputs = tuple[Batch | None, int]
"""A batch on the run's device, or None for samples; and the number of samples."""


def infer_one(trained: Trained, inputs: Inputs) -> Inference:
    """Return the task's inference for one batch of inputs, with the same random numbers each time."""
    batch, count = inputs
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trained.config.seed)
        result: Inference = trained.run.task.infer(batch, count, trained.config.seed)
        return result


def read_inputs(trained: Trained, files: Sequence[Path], batch_size: int) -> Iterator[Inputs]:
    """Yield batches of the files; without files, of test samples for a task that needs inputs, else a wish for
    samples."""
    run = trained.run
    if not files and needs_inputs(trained):
        data = trained.test_data
        for start in range(0, min(len(data), SAMPLES), batch_size):
            indices = list(range(start, min(start + batch_size, len(data), SAMPLES)))
            yield to_device(data.fetch(indices, 0), run.device), len(indices)
        return
    if not files:
        yield None, SAMPLES
        return
    channels, height, _ = run.data.fields[getattr(run.task, "input_field", "image")].shape
    for start in range(0, len(files), batch_size):
        chosen = files[start : start + batch_size]
        try:
            images = [decode_image(file, channels, height, MAX_PIXELS) for file in chosen]
        except BadImageError as error:
            raise DataError(f"--input: {error.path}: {error.reason}. Leave this file out") from error
        batch: Batch = {"image": torch.stack(images)}
        yield to_device(batch, run.device), len(chosen)


def needs_inputs(trained: Trained) -> bool:
    """Does the task infer from inputs (labelled, or of a field that it names) rather than make samples?"""
    return hasattr(trained.run.task, "input_field") or (
        "label" in trained.run.data.fields and not hasattr(trained.run.task, "generate")
    )


def input_files(wanted: str) -> list[Path]:
    """Return the image file, or the image files below the folder, sorted. Raises DataError when there is none."""
    path = Path(wanted)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"--input: there is no file or folder {path}")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in EXTENSIONS)
    if not files:
        raise DataError(f"--input: no images in {path}; looked for {', '.join(EXTENSIONS)}")
    return files
