"""Numbers that an optimizer of a library reads in its step.

Prodigy and D-Adaptation divide by a sum over all gradients, and leave the update out while it is 0. Numbers that a
network or a trainer reads inside an optimizer's step, as Lightning's do, are no optimizer's. Nor is what a `GradScaler`
reads that the step of a wrapper calls, as Accelerate's does: whether gradients overflowed.
"""

from __future__ import annotations

from types import FrameType

import torch
from torch.optim import Optimizer

from mpt.planner.trace.cannot_plan import outer_frame

SCALER = torch.amp.grad_scaler.__name__
MOST_CALLS = 4
"""Functions between a read and the optimizer's own."""


def _is_scaled(inner: FrameType | None, outer: FrameType) -> bool:
    """Return whether a loss scale is among the functions from one to another that called it."""
    while inner is not None and inner is not outer:
        if inner.f_globals.get("__name__") == SCALER:
            return True
        inner = inner.f_back
    return False


def is_in_update(frame: FrameType | None) -> bool:
    """Return whether a frame is of a method of an optimizer outside torch, or of a function that one called."""
    for _ in range(MOST_CALLS):
        inner, frame = frame, outer_frame(frame)
        if frame is None or _is_scaled(inner, frame):
            return False
        # not by its variables: a frame that was asked for them holds them until it is asked again
        owner = frame.f_globals.get(frame.f_code.co_qualname.partition(".")[0])
        if isinstance(owner, type):
            return issubclass(owner, Optimizer)
        frame = frame.f_back
    return False
