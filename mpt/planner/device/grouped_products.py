"""Products of matrices in groups, `torch.nn.functional.grouped_mm`: the experts of a mixture.

Torch's rule for fake tensors takes bfloat16 alone, for which it has a kernel on some cards. The others, and the CPU,
take the groups one after another (`_grouped_mm_fallback`), in any of these dtypes, into the same result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpt.planner.device.fake_device import DEVICE

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNED = 16
"""Bytes of which a row of a result on a card takes a multiple."""
GROUPED = torch.ops.aten._grouped_mm.default


def grouped_product(
    operator: Any,
    first: Tensor,
    second: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Return the product of (rows, inner) with (groups, inner, columns), or with one or both of the others in groups.

    Two matrices of which the inner dimension is in groups make (groups, rows, columns).
    """
    if first.dtype not in DTYPES or first.dtype != second.dtype:
        return NotImplemented
    groups = () if offs is None else (len(offs),)
    by_form = {
        (2, 2): (*groups, first.shape[0], second.shape[1]),
        (2, 3): (first.shape[0], second.shape[-1]),
        (3, 2): (first.shape[1], second.shape[1]),
        (3, 3): (first.shape[0], first.shape[1], second.shape[-1]),
    }
    shape, dtype = by_form[first.dim(), second.dim()], out_dtype or first.dtype
    if first.device.type != DEVICE:
        return first.new_empty(shape, dtype=dtype)
    alignment = ALIGNED // dtype.itemsize
    padded = -(-shape[-1] // alignment) * alignment
    strides = (*(shape[1] * padded for _ in shape[2:]), padded, 1)
    return first.new_empty_strided(shape, strides, dtype=dtype)


def count_operations(first: Tensor, second: Tensor, *options: Any, **named: Any) -> int:
    """Return the floating-point operations of a product in groups."""
    rows = first.shape[1:] if (first.dim(), second.dim()) == (3, 2) else first.shape
    return 2 * rows.numel() * second.shape[-1]
