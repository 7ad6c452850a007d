"""Short texts that ranks leave for each other in their store, for threads that work during the training.

Collectives are the training's own and must come in one order; a thread cannot take part. Nothing here blocks inside
torch, so a waiting thread can be released.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mpt.errors import RankError

LOOK_SECONDS = 0.05


class Mail:
    """One rank's access. `store` is a connection that no other thread uses."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.until: float | None = None
        """When, on the monotonic clock, waiting is over for good; None is never."""

    def post(self, name: str, text: str) -> None:
        """Leave a text for all."""
        self.store.set(f"mail/{name}", text)

    def wait(self, names: Sequence[str]) -> list[str]:
        """Return texts as soon as all are there. Raises RankError if `until` comes before."""
        keys = [f"mail/{name}" for name in names]
        while not self.store.check(keys):
            if self.until is not None and time.monotonic() > self.until:
                raise RankError("another process did not write its part of the checkpoint")
            time.sleep(LOOK_SECONDS)
        return [self.store.get(key).decode() for key in keys]
