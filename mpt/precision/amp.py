"""Automatic mixed precision with `torch.autocast`: `amp` chooses its dtype for the device, `bf16` is always bfloat16.

Weights stay float32; operators on autocast's lists run in the lower precision. Float16 comes with a loss scaler per
phase.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from mpt.config.options import PrecisionOptions
from mpt.errors import ConfigError
from mpt.precision.shared.choice import choose_dtype
from mpt.precision.shared.policy import Policy

NAMES = {"amp": {}, "bf16": {"dtype": "bfloat16"}}
ABOUT = {
    "amp": "Automatic mixed precision by torch.autocast: float16 with a loss scale on a GPU, bfloat16 on a CPU.",
    "bf16": "Automatic mixed precision in bfloat16, which needs no loss scale.",
}
SHARDED = True
PROPOSALS = ("bf16", "amp")
"""Both hold the same bytes; bfloat16 needs no loss scale, which some tricks refuse."""
NEEDS_BFLOAT16 = ("bf16",)
SCALED = ("amp",)


class Settings(PrecisionOptions):
    """Nothing beyond the common settings."""


class Region:
    """`torch.autocast`, kept from one forward to the next: making one takes as long as entering it.

    One autocast cannot be entered twice at a time, so there are as many as forwards inside each other.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type, self.dtype = device_type, dtype
        self.open: list[torch.autocast] = []
        self.idle: list[torch.autocast] = []

    def __enter__(self) -> None:
        own = self.idle.pop() if self.idle else torch.autocast(self.device_type, self.dtype)
        own.__enter__()  # type: ignore[no-untyped-call]
        self.open.append(own)

    def __exit__(self, *error: object) -> None:
        own = self.open.pop()
        own.__exit__(*error)
        self.idle.append(own)


class Autocast(Policy):
    """Forwards under `torch.autocast`."""

    can_fall_back = True
    region: Region | None = None

    def forward(self) -> AbstractContextManager[Any]:
        """Return the autocast context of this dtype."""
        if self.region is None or self.region.dtype is not self.numerics.dtype:
            self.region = Region(self.device.type, self.numerics.dtype)
        return self.region


def build(name: str, settings: Settings, device: torch.device) -> Policy:
    """Build the mode; `dtype: auto` is resolved for the device."""
    if name == "bf16" and settings.dtype == "float16":
        raise ConfigError(
            "precision.dtype: bf16 is bfloat16 by name; for float16 use precision=amp"
        )
    dtype, reason = choose_dtype(settings, device, NAMES[name].get("dtype"))
    return Autocast(name, settings, device, dtype, reason)
