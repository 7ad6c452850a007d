"""The mode `O1`: Apex's automatic casts (`mpt.precision.o1`) around every forward, float32 weights, a scaler per phase.

Apex's O1 means float16. On a CPU, which emulates float16, `dtype: auto` takes bfloat16 and says so; `dtype: float16`
forces Apex's own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from mpt.config.options import PrecisionOptions
from mpt.precision import o1
from mpt.precision.shared.choice import choose_dtype
from mpt.precision.shared.policy import Policy

NAMES: dict[str, dict[str, object]] = {"O1": {}}
SHARDED = True
SCALED = ("O1",)


class Settings(PrecisionOptions):
    """Nothing beyond the common settings."""


class ApexCasts(Policy):
    """Forwards under O1's cast lists."""

    can_fall_back = True

    def forward(self) -> AbstractContextManager[Any]:
        """Return the casting context of this dtype."""
        return o1.casts(self.numerics.dtype)


def build(name: str, settings: Settings, device: torch.device) -> Policy:
    """Build the mode; `dtype: auto` is resolved for the device."""
    dtype, reason = choose_dtype(settings, device)
    mode = ApexCasts(name, settings, device, dtype, f"Apex's cast lists, {reason}")
    mode.numerics = replace(mode.numerics, casts_calls=True)
    return mode
