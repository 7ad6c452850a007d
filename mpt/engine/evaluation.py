"""Evaluation and previews: the same test samples every time, without disturbing the training's random numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mpt.data.images import write_grid
from mpt.data.loader import Loader, to_device
from mpt.engine.build import Run
from mpt.run.layout import RunDirectory
from mpt.seams import Batch, Dataset


def test_batches(run: Run, data: Dataset, batch_size: int) -> Iterator[Batch]:
    """Yield the whole test set in order, on the run's device."""
    loader = Loader(data, min(batch_size, len(data)), run.config.seed, drop_last=False, shuffle=False)
    for batch in loader.evaluation_batches():
        yield to_device(batch, run.device, run.data)


def evaluate(run: Run, data: Dataset, batch_size: int) -> dict[str, float]:
    """Return the task's figures on the test set. Random generators are left as they were found."""
    with torch.random.fork_rng(devices=_cuda(run.device)):
        torch.manual_seed(run.config.seed)
        return run.task.evaluate(test_batches(run, data, batch_size))


def write_preview(run: Run, data: Dataset, directory: RunDirectory, step: int) -> None:
    """Write the task's preview grid for this step as a PNG, where the task has one."""
    count = min(len(data), run.config.train.batch_size)
    batch = to_device(data.fetch(list(range(count)), 0), run.device, run.data)
    with torch.random.fork_rng(devices=_cuda(run.device)):
        torch.manual_seed(run.config.seed)
        tiles = run.task.preview(batch)
    if tiles is not None:
        columns = getattr(run.task, "preview_columns", None)
        write_grid(tiles, directory.samples / f"step-{step:08d}.png", columns)


def _cuda(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type == "cuda" else []
