"""Results and costs of operators on fake tensors, kept for calls with arguments of the same forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Kernel = tuple[int, int]
"""Floating-point operations, and bytes read and written."""


Unit = Literal["half", "float32", "convolution", "channel"]
"""The arithmetic of a kernel: half, float32, cuDNN's float32, for which TF32 has a switch of its own, or one block of
threads for each channel, whose elements (in place of operations) it goes through one after another.
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one call of an operator."""

    place: Literal["device", "link", "host", "nowhere"]
    """Its place: the device, the link to the host, or the host's own processor."""
    kernels: tuple[Kernel, ...]
    """Kernels that it launches; one copy or loop on the link or on the host."""
    unit: Unit
    is_uncertain: bool = False
    """Whether published times of such kernels are spread more widely than of others."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a new tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Number:
    """A number among the results, such as the longest sequence of an attention."""

    value: int


Result = Form | Number | int | None
"""A new tensor, a number, an argument by its position, or None."""


@dataclass(slots=True)
class Outcome:
    """An operator's results for arguments of certain forms."""

    results: tuple[Result, ...]
    container: type[tuple[Any, ...]] | type[list[Any]] | None = None
    """None if the result is no sequence."""
    cost: Cost | None = None
    """The cost of such a call, computed on first use."""
