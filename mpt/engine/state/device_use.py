"""How busy the device is, as its driver counts it: sampled at log lines, "not measured" with the reason elsewhere.

The figure is the share of the driver's last sample period in which any kernel ran (as nvidia-smi shows): a low one
says that the card waits for data or for the program, a high one does not say that it is used well. The driver renews it
once in 1/6 to 1 s, so it is asked at most once a second, and never for more than a hundredth of the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from mpt import accelerator
from mpt.errors import MptError

LEAST_SECONDS = 1.0
"""Between two questions."""
MOST_SHARE = 0.01
"""Of a training's time that questions may take."""


class DeviceUse:
    """Asks a device's driver now and then, and keeps the mean of this process's samples."""

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device, self.clock = device, clock
        self.total, self.samples, self.next_at = 0.0, 0, -math.inf
        self.reason = "no log line has been written yet"
        """Why there is no figure; "" once there is one."""
        self.can_tell = True

    def look(self) -> dict[str, float]:
        """Return a sample as an entry of a log line; nothing if none is due or the driver has none."""
        started = self.clock()
        if not self.can_tell or started < self.next_at:
            return {}
        try:
            share = accelerator.busy_share(self.device)
        except MptError as error:
            self.can_tell = False
            self.reason = self.reason and str(error)
            return {}
        now = self.clock()
        self.next_at = now + max(LEAST_SECONDS, (now - started) / MOST_SHARE)
        self.total, self.samples, self.reason = self.total + share, self.samples + 1, ""
        return {"device_utilization": share}

    def to_record(self) -> dict[str, Any]:
        """Return the entry of a summary: mean and samples, or why there are none."""
        if not self.samples:
            return {"not_measured": self.reason}
        return {"mean": self.total / self.samples, "samples": self.samples}
