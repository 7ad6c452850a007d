"""The loss of a classifier by name: a file in `losses/` of a part package with `loss(logits, labels)` is one.

`cross_entropy` is torch's own. Only files in that folder are looked for, so a name imports nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from mpt.config.finding.registry import INSTALLED
from mpt.config.options import CROSS_ENTROPY
from mpt.errors import ConfigError

ClassificationLoss = Callable[[Tensor, Tensor], Tensor]
"""Logits (b, classes) and labels (b,) to the mean over the samples that have a label (not -100), a scalar."""


def find_loss(
    name: str, label_smoothing: float = 0.0, weights: Tensor | None = None
) -> ClassificationLoss:
    """Return the loss of that name; with class weights, its sum over the batch in place of the mean.

    Raises ConfigError for a name without a file, and for smoothing that it lacks.
    """
    if name == CROSS_ENTROPY:
        reduction = "mean" if weights is None else "sum"
        return lambda logits, labels: functional.cross_entropy(
            logits,
            labels,
            None if weights is None else widen(weights, logits),
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    known = INSTALLED.functions("losses")
    if name not in known:
        raise ConfigError(
            f"task.loss: no loss {name!r}; there are {', '.join([CROSS_ENTROPY, *known])}"
        )
    if label_smoothing:
        raise ConfigError(f"task.label_smoothing: {name} has none; it belongs to {CROSS_ENTROPY}")
    found: ClassificationLoss = known[name].member("loss")
    return found


def widen(weights: Tensor, logits: Tensor) -> Tensor:
    """Return class weights in the logits' dtype, and 1 for outputs beyond the last class (`nn` may have spare ones)."""
    if logits.shape[1] == len(weights):
        return weights.to(logits.dtype)
    return functional.pad(weights, (0, logits.shape[1] - len(weights)), value=1.0).to(logits.dtype)
