"""Function modes that stay in force during a backward pass.

Torch takes a mode off for the call that it handles, and `loss.backward()` is such a call: what a checkpoint computes
again inside it would go past the mode that saw it in forward, with other dtypes or on another device.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeptInBackward(TorchFunctionMode):
    """A mode whose `handle` also sees what is recomputed in a backward pass, and so do the modes outside of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            return self.handle(func, args, kwargs)
        run = backward_of if func is Tensor.backward else func
        with mock.patch.object(torch.autograd, "has_torch_function", has_none), self:
            return run(*args, **kwargs)

    def handle(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Answer a call of one of torch's functions."""
        return func(*args, **kwargs)


def has_none(tensors: Any) -> bool:
    """Say that no tensor has a function of its own, so that torch does not hand the call over to modes."""
    return False  # a Mock would remember, and so keep, the tensors that it was asked about


def backward_of(
    tensor: Tensor,
    gradient: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Propagate back as `Tensor.backward`, as an ordinary function that no mode is taken off for."""
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)
