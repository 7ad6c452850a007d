"""Evaluations before a script's first step: of many with the same shapes, the first few are executed.

A script may compare hundreds of batches before it trains (`estimate_loss`, a warm-up of a replay buffer), each of which
takes as long in a plan as a step. All of them need the memory of the first, and what follows from their values is not
known anyway. So further ones return tensors of the same forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from mpt.planner.trace.repeated_calls import Form, form_of, made_of
from mpt.run.process.storage_trace import tensors_in

EXECUTED = 3
"""Evaluations of the same forms that are executed, with results of the same forms."""


def is_trained(network: nn.Module, *given: Any) -> bool:
    """Return whether a call may record gradients: not that of a moving average, whose weights want none."""
    return any(one.requires_grad for one in (*network.parameters(), *tensors_in(given)))


class Evaluations:
    """Calls of a script's networks without gradients, be they recorded elsewhere."""

    def __init__(self) -> None:
        self.left_out = 0
        """Calls that were not executed."""
        self._is_inside = False
        self._results: dict[Any, tuple[Form | None, int]] = {}
        """A network with the forms that it is given -> the form of its results, and how often they had it."""

    def call(
        self,
        forward: Callable[..., Any],
        network: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a network, or return tensors like its results."""
        given = None if self._is_inside else form_of((args, dict(kwargs)))
        if given is None:
            return forward(network, *args, **kwargs)
        key = id(network), type(network), network.training, torch.is_autocast_enabled("cuda"), given
        form, count = self._results.get(key, (None, 0))
        if form is not None and count >= EXECUTED:
            self.left_out += 1
            return made_of(form)
        self._is_inside = True
        try:
            result = forward(network, *args, **kwargs)
        finally:
            self._is_inside = False
        now = form_of(result)
        self._results[key] = now, count + 1 if now == form else 1
        return result
