"""What a call of an operator on fake tensors returns and takes, kept for calls with arguments of the same forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Kernel = tuple[int, int]
"""Floating-point operations, and bytes read and written."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a call of an operator takes."""

    place: Literal["device", "link", "host", "nowhere"]
    """Where: on the device, on the way between it and the host, on the host's own processor."""
    kernels: tuple[Kernel, ...]
    """What it launches; one copy or loop on the link or on the host."""
    half: bool
    is_uncertain: bool = False
    """Whether published times of such kernels are spread more widely than of others."""


@dataclass(frozen=True, slots=True)
class Form:
    """What tells one new tensor from another."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class Outcome:
    """What an operator returns for arguments of certain forms: new tensors, arguments by their position, or None."""

    results: tuple[Form | int | None, ...]
    container: type[tuple[Any, ...]] | type[list[Any]] | None = None
    """None if the result is no sequence."""
    cost: Cost | None = None
    """What such a call takes, once somebody has asked."""
