"""Comparisons of whole tensors whose result is read at once: `torch.equal(a, b)` and `torch.allclose(a, b)`.

A card compares number by number, joins the answers and reads one, and so does a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_read: Any = torch.ops.aten._local_scalar_dense.default


def equal(first: Tensor, second: Tensor) -> bool:
    """Read whether two tensors have the same shape and numbers."""
    return first.shape == second.shape and bool(_read((first == second).all()))


def close(first: Tensor, second: Tensor, *options: Any, **named: Any) -> bool:
    """Read whether the numbers of two tensors are nearly the same."""
    return bool(_read(torch.isclose(first, second, *options, **named).all()))


PARTS: Mapping[Any, Callable[..., bool]] = {
    torch.ops.aten.equal.default: equal,
    torch.ops.aten.allclose.default: close,
}
"""Operator -> the function that does it by its parts."""
