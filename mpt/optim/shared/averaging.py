"""Optimizers that train one set of weights and are judged by another, an average that they keep on the way.

Parameters hold the training weights. The engine puts the averages into them around evaluations, previews and inference,
and into the modules of a checkpoint, whose training weights are saved alongside (`mpt.engine.state.averages`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class AveragingOptimizer(Optimizer):
    """An optimizer whose parameters are not the training's result."""

    def average(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor | None:
        """Return the weights to evaluate in place of a parameter, float32; None if they are the same."""
        raise NotImplementedError
