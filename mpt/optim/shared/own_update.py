"""Shared by the optimizers that are written here: torch's protocol of a step around an update of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer


class OwnUpdate(Optimizer):
    """An optimizer whose subclass says how parameters with a gradient are updated."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one update; return the closure's loss, computed before it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    def update(self) -> None:
        """Change the parameters in place. Called without gradients."""
        raise NotImplementedError
