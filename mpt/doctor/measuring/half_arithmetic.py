"""Float16 on a CPU as a GPU would compute it: products summed in float32, results rounded to float16.

CPUs without float16 instructions take minutes for a convolution in it, and some kernels do not exist. Tensor cores
multiply float16 exactly and add in float32, so computing an operator in float32 on its float16 inputs and rounding the
result is closer to a GPU than a CPU's own float16 kernels are. This does not show the order in which a GPU
adds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mpt.doctor.measuring.cuda_lists import DECOMPOSITIONS

aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.baddbmm,
        aten.addbmm,
        aten.mv,
        aten.addmv,
        aten.addr,
        aten.dot,
        aten.vdot,
        aten.convolution,
        aten.convolution_backward,
        aten._convolution,
        aten.mkldnn_convolution,
    }
)
"""Operators that are always computed in float32; others only if the CPU has no kernel in float16."""
ROUNDED = {torch.float32: torch.float16, torch.complex64: torch.complex32}
"""What is computed -> what it is rounded to."""
MISSING = (
    "not implemented for 'Half'",
    "not supported on",
    "could not create a primitive",
    "unsupported dtype",
)


class RoundedHalf(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within its block float16 operators are computed in float32 and rounded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _holds_half((args, kwargs)):
            return func(*args, **kwargs)
        if func._overloadpacket in PRODUCTS:
            return rounded(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            missing = any(words in str(error) for words in MISSING)
            if (
                func._schema.is_mutable
                or not missing
                or DECOMPOSITIONS.fullmatch(func._overloadpacket.__name__)
            ):
                raise
            return rounded(func, args, kwargs)


def rounded(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operator on float32 copies of its float16 inputs and return its float32 results as float16."""

    def up(value: Any) -> Any:
        return (
            value.float() if isinstance(value, Tensor) and value.dtype == torch.float16 else value
        )

    def down(value: Any) -> Any:
        return (
            value.to(ROUNDED.get(value.dtype, value.dtype)) if isinstance(value, Tensor) else value
        )

    return tree_map(down, func(*tree_map(up, args), **tree_map(up, kwargs)))


def _holds_half(values: Any) -> bool:
    return any(
        isinstance(value, Tensor) and value.dtype == torch.float16 for value in tree_leaves(values)
    )
