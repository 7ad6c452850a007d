"""A watch for memory that a driver has moved into system memory (`mpt.run.process.operating_system.moves_overflow`).

Nothing fails then: the allocator holds more than the card has, or the card is full and steps take several times as
long. `memory.ceiling` turns the first into out of memory; other programs that take memory later, and a ceiling that was
switched off, are seen here only.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from mpt import accelerator
from mpt.config.sizes import describe_bytes
from mpt.run.process import operating_system

FULL_SHARE = 0.02
"""A card with less than this free is full."""
SLOWER = 2.0
"""Times the usual step: reports of spilled trainings give 2 to 20 (https://github.com/kohya-ss/musubi-tuner/issues/685,
https://github.com/microsoft/WSL/issues/10452)."""
USUAL_WINDOWS = 3
"""Logged windows that make a usual step; the first one, with the warm-up, is none of them."""
WINDOWS_SETTING = (
    'set "CUDA - Sysmem Fallback Policy" to "Prefer No Sysmem Fallback" for python.exe in the NVIDIA Control Panel '
    "(Manage 3D settings)"
)
WSL_SETTING = "the driver's setting does not reach WSL (microsoft/WSL#11050)"


class SpillWatch:
    """Looks, at each log line, whether a training has spilled; says so once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_quiet = (
            not accelerator.has_allocator(device) or not operating_system.moves_overflow()
        )
        self.windows: list[float] = []
        self.outside = 0
        if not self.is_quiet:
            self.outside = accelerator.outside_bytes(device)

    def look(self, step_seconds: float) -> tuple[str, dict[str, Any]] | None:
        """Return a warning and its figures when a spill is seen; `step_seconds` is the mean of the last window."""
        if self.is_quiet:
            return None
        usual = statistics.median(self.windows[1:]) if len(self.windows) > USUAL_WINDOWS else None
        self.windows.append(step_seconds)
        free, total = accelerator.free_and_total(self.device)
        beyond = accelerator.reserved_bytes(self.device) + self.outside - total
        slower = step_seconds / usual if usual else 0.0
        if beyond > 0:
            found = f"{describe_bytes(beyond)} more are in use than the card has"
        elif slower > SLOWER and free < FULL_SHARE * total:
            found = f"the card is full and steps take {slower:.1f} times as long as before"
        else:
            return None
        self.is_quiet = True
        setting = WSL_SETTING if operating_system.is_wsl() else WINDOWS_SETTING
        text = (
            f"{found}: the driver has moved memory of this training into system memory, which makes it several times "
            f"slower without an error. Stop and resume with memory.ceiling=auto, close other programs, or {setting}"
        )
        return text, {"beyond_bytes": max(0, beyond), "slower": round(slower, 2)}
