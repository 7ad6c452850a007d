"""Peak memory of a step: the allocator's own figures on CUDA, tracked live tensor bytes on a CPU.

A CPU has no allocator statistics worth quoting, and resident set size says nothing of a step; so one early step, the
second, when the optimizer has its state, is performed under a tracker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mpt.engine.build import Run

TRACKED_STEP = 1
"""Index, within this process, of the step that is tracked on a CPU: the first has no optimizer state yet."""


def known_tensors(run: Run) -> dict[str, list[Tensor]]:
    """Return the tensors that a peak is split by: parameters (masters included) and optimizer state."""
    parameters = [p for module in run.task.modules.values() for p in module.parameters()]
    parameters += [p for o in run.optimizers.values() for group in o.param_groups for p in group["params"]]
    buffers = [b for module in run.task.modules.values() for b in module.buffers()]
    return {"parameters": parameters + buffers, "optimizer_state": list(_optimizer_tensors(run))}


def _optimizer_tensors(run: Run) -> Iterator[Tensor]:
    for optimizer in run.optimizers.values():
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def peak_memory(device: torch.device, tracked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the peak as a row for the log: "cuda" figures, or the tracked split once it is known."""
    if device.type == "cuda":
        return {
            "kind": "cuda",
            "peak_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device),
        }
    return dict(tracked)
