"""Figures are computed in float64 if the device has it, and on the CPU if not (Apple's, many of Intel's)."""

from __future__ import annotations

from torch import Tensor

WITHOUT_FLOAT64 = ("mps", "xpu")


def in_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on its own device if that can compute in it."""
    return (tensor.cpu() if tensor.device.type in WITHOUT_FLOAT64 else tensor).double()
