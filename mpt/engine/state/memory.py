"""Peak memory of a step: the allocator's own figures on a GPU, tracked live tensor bytes on a CPU.

A CPU has no allocator statistics worth quoting, and resident set size says nothing of a step; so an early step, the
second, when the optimizer has its state, is performed under a tracker, and later ones with phases that it did not have.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpt import accelerator
from mpt.seams import Run

TRACKED_STEP = 1
"""How many whole steps (no phase skipped) go before those that are tracked on a CPU: the first has no optimizer state
yet."""


def known_tensors(run: Run) -> dict[str, list[Tensor]]:
    """Return the tensors that a peak is split by: parameters (masters included) and optimizer state."""
    parameters = [p for module in run.task.modules.values() for p in module.parameters()]
    parameters += [
        p for o in run.optimizers.values() for group in o.param_groups for p in group["params"]
    ]
    buffers = [b for module in run.task.modules.values() for b in module.buffers()]
    return {"parameters": parameters + buffers, "optimizer_state": list(_optimizer_tensors(run))}


def _optimizer_tensors(run: Run) -> Iterator[Tensor]:
    for optimizer in run.optimizers.values():
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


@dataclass
class AllocatorPeaks:
    """The peaks of a GPU's allocator in bytes: of the whole run, and of its training steps alone.

    Evaluation, samples and saving have peaks of their own, which a plan of the step does not know. The memory that they
    reserve stays reserved, so the steps' reserve counts only where it goes beyond what they have raised it to.
    """

    allocated: int = 0
    reserved: int = 0
    steps_allocated: int = 0
    steps_reserved: int = 0
    raised_outside: int = 0
    """What something outside the steps has raised the reserve to."""
    allocations: int = -1
    """How many allocations had been made at the end of the last work outside the steps."""

    def count_steps(self, device: torch.device) -> None:
        """Take over the peaks of the steps since the last work alongside them."""
        if (
            accelerator.has_allocator(device)
            and accelerator.allocations_made(device) != self.allocations
        ):
            # Without a step since then, the memory left by an evaluation (a cuBLAS workspace) would be taken for the
            # steps'.
            allocated, reserved = accelerator.peaks(device)
            self.steps_allocated = max(self.steps_allocated, allocated)
            if reserved > self.raised_outside:
                self.steps_reserved = max(self.steps_reserved, reserved)
            self.allocated, self.reserved = (
                max(self.allocated, allocated),
                max(self.reserved, reserved),
            )

    @contextmanager
    def beside_steps(self, device: torch.device) -> Iterator[None]:
        """Keep the peaks of code in the block out of the steps'."""
        self.count_steps(device)
        before = self.reserved
        try:
            yield
        finally:
            if accelerator.has_allocator(device):
                if device.type == "cuda":
                    # Workspaces that the block's matrix products took for cuBLAS would stay, alongside steps that may
                    # need none.
                    torch._C._cuda_clearCublasWorkspaces()
                allocated, reserved = accelerator.peaks(device)
                if reserved > before:
                    self.raised_outside = reserved
                self.allocated, self.reserved = (
                    max(self.allocated, allocated),
                    max(self.reserved, reserved),
                )
                accelerator.reset_peaks(device)
                self.allocations = accelerator.allocations_made(device)

    def to_record(self, device: torch.device) -> dict[str, Any]:
        return {
            "kind": device.type,
            "peak_bytes": self.allocated,
            "reserved_bytes": self.reserved,
            "steps_peak_bytes": self.steps_allocated,
            "steps_reserved_bytes": self.steps_reserved,
        }


def snapshot_of(device: torch.device) -> bytes:
    """Return torch's snapshot of a GPU's segments and blocks, as torch's viewer reads it; empty if there is none.

    For the moment at which memory has run out: a further failure, of the snapshot too, must not hide the first.
    """
    if not accelerator.has_allocator(device):
        return b""
    try:
        return pickle.dumps(torch.get_device_module(device).memory._snapshot(device))
    except (RuntimeError, MemoryError, AttributeError):
        return b""


def outside_bytes(device: torch.device) -> dict[str, Any]:
    """Return a GPU's bytes outside this process's allocator: its context, and other processes."""
    if not accelerator.has_allocator(device):
        return {}
    return {
        "outside_bytes": accelerator.outside_bytes(device),
        "device": accelerator.name_of(device),
    }
