"""Results and costs of operators on fake tensors, kept for calls with arguments of the same forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Kernel = tuple[int, int]
"""Floating-point operations, and bytes read and written."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one call of an operator."""

    place: Literal["device", "link", "host", "nowhere"]
    """Its place: the device, the link to the host, or the host's own processor."""
    kernels: tuple[Kernel, ...]
    """Kernels that it launches; one copy or loop on the link or on the host."""
    half: bool
    is_uncertain: bool = False
    """Whether published times of such kernels are spread more widely than of others."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a new tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class Outcome:
    """An operator's results for arguments of certain forms: new tensors, arguments by their position, or None."""

    results: tuple[Form | int | None, ...]
    container: type[tuple[Any, ...]] | type[list[Any]] | None = None
    """None if the result is no sequence."""
    cost: Cost | None = None
    """The cost of such a call, computed on first use."""
