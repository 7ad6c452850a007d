"""Build networks without giving their weights values, if they are on the `meta` device and can hold none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

GIVE_VALUES = frozenset(
    {Tensor.normal_, Tensor.uniform_, Tensor.zero_, Tensor.fill_, Tensor.erfinv_, Tensor.clamp_}
)
"""Operators of initializers, which change values and nothing else."""
CHANGE_VALUES = frozenset({Tensor.add_, Tensor.mul_})
"""The same, if the other operand is a number."""
INITIALIZERS = frozenset({init.uniform_, init.normal_, init.constant_, init.kaiming_uniform_})
"""A mode is asked about these as a whole, and not about the operators in them."""


class WithoutValues(TorchFunctionMode):
    """Leaves `meta` tensors as they are if only their values would change; torch takes most of a build for that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_filled = func in GIVE_VALUES or (
            func in CHANGE_VALUES and len(args) == 2 and type(args[1]) in (int, float)
        )
        if (
            is_filled
            and args[0].is_meta
            and not (args[0].requires_grad and torch.is_grad_enabled())
        ):
            return args[0]
        if func in INITIALIZERS and kwargs and "tensor" in kwargs:
            tensor = kwargs["tensor"]
            is_refused = func is init.kaiming_uniform_ and (tensor.dim() < 2 or not tensor.numel())
            if tensor.is_meta and not is_refused:
                return tensor
        try:
            return func(*args, **(kwargs or {}))
        except (
            NotImplementedError
        ) as error:  # a parametrization would take it for its own way to say "not needed"
            raise RuntimeError(f"{func} has no rule for shapes alone") from error
