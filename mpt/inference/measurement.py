"""The cost of inference, and the distance of two precisions: latency, memory, size, distance.

Latency is the median and the 95th percentile over calls after a warm-up, each call synchronised on its own. Memory is
the allocator's peak on a GPU, without other runs' memory, and the peak of live tensor bytes on a CPU. Both are taken
of one batch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpt import accelerator
from mpt.run.checkpoints.tensor_file import build_header
from mpt.run.process.memory_meter import measure_step
from mpt.seams import Inference, Run

WARM_UP_CALLS = 3
FEWEST_CALLS, MOST_CALLS = 5, 100
BUDGET_SECONDS = 0.5


@dataclass(frozen=True)
class Latency:
    """Seconds per call."""

    median_seconds: float
    p95_seconds: float
    calls: int


@dataclass(frozen=True)
class Distance:
    """How far outputs lie from reference outputs on the same input."""

    max_error: float
    mean_error: float
    relative_error: float
    """Mean error over the mean magnitude of the reference."""
    finite: bool
    agreement: float | None
    """Share of equal decisions; None if nothing is decided."""
    decisions: int


def measure_latency(call: Callable[[], object], device: torch.device) -> Latency:
    """Time a call: warm-up first, then as many calls as the budget allows."""
    for _ in range(WARM_UP_CALLS):
        call()
    accelerator.synchronize(device)
    seconds: list[float] = []
    started = time.perf_counter()
    while len(seconds) < MOST_CALLS and (
        len(seconds) < FEWEST_CALLS or time.perf_counter() - started < BUDGET_SECONDS
    ):
        before = time.perf_counter()
        call()
        accelerator.synchronize(device)
        seconds.append(time.perf_counter() - before)
    ordered = sorted(seconds)
    return Latency(
        statistics.median(seconds), ordered[math.ceil(0.95 * len(ordered)) - 1], len(seconds)
    )


def measure_peak(call: Callable[[], object], run: Run) -> int:
    """Return the peak bytes of one call, this run's weights included and those of other runs not."""
    held = [
        tensor
        for module in run.task.modules.values()
        for tensor in (*module.parameters(), *module.buffers())
    ]
    if accelerator.has_allocator(run.device):
        own = sum(
            {
                one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held
            }.values()
        )
        accelerator.empty_cache(run.device)
        accelerator.reset_peaks(run.device)
        before = accelerator.allocated_bytes(run.device)
        call()
        return own + accelerator.peaks(run.device)[0] - before
    return measure_step(call, lambda: {"parameters": held}, run.device).peak_bytes


def stored_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the tensors of several networks by dotted names, as a file would hold them."""
    return {
        f"{name}.{key}": value.detach()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }


def stored_bytes(modules: Mapping[str, nn.Module]) -> int:
    """Return the size of these networks' weights as a safetensors file."""
    tensors = stored_tensors(modules)
    return len(build_header(tensors)[0]) + sum(
        value.numel() * value.element_size() for value in tensors.values()
    )


def measure_distance(reference: Sequence[Inference], other: Sequence[Inference]) -> Distance | None:
    """Compare the raw outputs and the decisions of two inferences on the same input; None without either."""
    pairs = [
        (first.outputs.cpu().double(), second.outputs.cpu().double())
        for first, second in zip(reference, other, strict=True)
        if first.outputs is not None and second.outputs is not None
    ]
    labels = [
        (row["label"], other_row["label"])
        for first, second in zip(reference, other, strict=True)
        for row, other_row in zip(first.rows, second.rows, strict=False)
        if "label" in row and "label" in other_row
    ]
    if not pairs and not labels:
        return None
    errors = [(second - first).abs().flatten() for first, second in pairs]
    error = torch.cat(errors) if errors else torch.zeros(1)
    scale = (
        torch.cat([first.abs().flatten() for first, _ in pairs]).mean() if pairs else torch.ones(())
    )
    return Distance(
        max_error=float(error.max()),
        mean_error=float(error.mean()),
        relative_error=float(error.mean() / scale) if float(scale) else math.nan,
        finite=bool(torch.isfinite(error).all()),
        agreement=sum(first == second for first, second in labels) / len(labels)
        if labels
        else None,
        decisions=len(labels),
    )
