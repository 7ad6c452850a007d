"""Torch's switches for a whole process, which a script sets for its own: each of its plans starts from the same ones.

A factory is executed once for each change to its script and for each size of batch that is planned, and one that sets a
default dtype after its network is made would find it set before the next time. Switches for TF32 stay, since torch does
not tell those that are set from those that follow from others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mpt.planner.device.routes import KERNELS


@contextmanager
def switches_kept() -> Iterator[None]:
    """Set torch's switches back as they were when the block ends."""
    dtype, has_gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    attention = {name: getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in KERNELS}
    order = torch._C._get_sdp_priority_order()
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(order)
        for name, is_on in attention.items():
            getattr(torch._C, f"_set_sdp_use_{name}")(is_on)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(has_gradients)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns)
