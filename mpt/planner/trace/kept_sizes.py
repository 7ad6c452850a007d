"""Results whose storage is larger than they are: their kernels make a tensor in it and then shrink that to the result.

The storage keeps its size, in PyTorch's kernels for the CPU as for CUDA; a fake result's does not. A loss of the mean
squared error of two images holds the memory of an image until it is dropped, and its kernel writes the squares to
another such tensor (`Loss.cpp`, `mse_loss_out`; `Col2Im.cu`).
"""

from __future__ import annotations

from typing import Any

import torch

ELEMENTWISE = frozenset({"aten::mse_loss", "aten::smooth_l1_loss"})
"""Asked for the mean or the sum, they make a tensor of all elements for the result and one for their values."""
IN_ONE = frozenset({"aten::binary_cross_entropy", "aten::soft_margin_loss"})
"""They make one of all elements, which becomes the result."""
FOLD = "aten::col2im"
OPERATORS = ELEMENTWISE | IN_ONE | {FOLD}


def least_bytes(operator: str, args: Any, result: Any) -> int:
    """Return the bytes of the storage of an operator's result, if it is in `OPERATORS`."""
    if operator == FOLD:
        return int(args[0].nbytes)
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    return int(shape.numel() * result.element_size())
