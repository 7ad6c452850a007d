"""Whether the losses of an update are finite, found out before its optimizer steps and without stopping the device.

This is the one place of a step that looks at a tensor's values, which fake tensors skip.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mpt.seams.questions import Questions, ask


def all_finite(losses: dict[str, Tensor], watch: LossWatch | None) -> bool:
    """Return whether every loss of an update, summed by name, was finite."""
    if watch is not None and watch.copied is not None:
        return watch.saw_finite()
    if Questions.open and losses:
        return ask(
            torch.stack([loss.isfinite().all() for loss in losses.values()]).all(), usual=True
        )
    # Waits for each; a fake one has no value and counts as finite. A generator would take longer.
    for loss in losses.values():  # noqa: SIM110
        if not isinstance(loss, FakeTensor) and not math.isfinite(loss):
            return False
    return True


class LossWatch:
    """Finds out on a GPU whether all losses of an update are finite before its optimizer steps, without stopping it.

    The sum of the losses so far is copied to the host as soon as each forward is done, during its backward. What is
    waited for before the optimizer's step is thus the last forward alone: meanwhile the GPU has the last backward to
    do, and never idles. A step that must not be is still not taken, so that there is nothing to undo.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total: Tensor | None = None
        self.host: Tensor | None = None
        self.copied: torch.Event | None = None

    def look(self, loss: Tensor) -> None:
        """Take a loss into account; call between its forward and its backward."""
        if isinstance(loss, FakeTensor):
            return
        value = loss.detach().float()
        self.total = value if self.total is None else self.total + value
        self.host = torch.empty((), pin_memory=True)
        self.host.copy_(self.total.reshape(()), non_blocking=True)
        self.copied = torch.Event(self.device)
        self.copied.record()

    def saw_finite(self) -> bool:
        """Wait for the last copy, and return whether all losses were finite."""
        assert self.copied is not None
        assert self.host is not None
        self.copied.synchronize()
        return math.isfinite(self.host)
