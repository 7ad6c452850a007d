"""Dtypes that an operator's kernels refuse, which torch's rules for fake tensors let pass.

Without this a step is planned that ends at its first product of a half and a float32 tensor, and autocast is proposed
for one whose sums (`zeros.index_add_(0, places, messages)`) it breaks. The checks are those that kernels of the CPU and
of CUDA share, found by calling operators with mixed and half arguments on fake and on real tensors, with torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
ALIKE: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys(
        (_aten.mm.default, _aten.bmm.default, _aten.dot.default, _aten.mv.default), (0, 1)
    ),
    **dict.fromkeys((_aten.addmm.default, _aten.baddbmm.default, _aten.linear.default), (0, 1, 2)),
    _aten.convolution.default: (0, 1, 2),
    **dict.fromkeys((_aten.index_add.default, _aten.index_add_.default), (0, 3)),
    **dict.fromkeys((_aten.index_copy.default, _aten.index_copy_.default), (0, 3)),
    **dict.fromkeys((_aten.index_put.default, _aten.index_put_.default), (0, 2)),
    **dict.fromkeys((_aten.grid_sampler_2d.default, _aten.grid_sampler_3d.default), (0, 1)),
    _aten.binary_cross_entropy.default: (0, 1),
    **dict.fromkeys((_aten.complex.default, _aten.polar.default), (0, 1)),
}
"""Operator -> the places of tensors that must have one dtype."""
LABELS = {_aten.nll_loss_forward.default: (torch.int64, torch.uint8)}
"""Operator -> the dtypes of labels, in second place."""
_HALVES = torch.float16, torch.bfloat16
_BFLOAT16 = (torch.bfloat16,)
REFUSED: dict[Any, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(
        (
            _aten._linalg_solve_ex.default,
            _aten._linalg_svd.default,
            _aten._linalg_eigh.default,
            _aten._linalg_det.default,
            _aten._linalg_slogdet.default,
            _aten.linalg_inv_ex.default,
            _aten.linalg_qr.default,
            _aten.linalg_cholesky_ex.default,
            _aten.linalg_lu_factor_ex.default,
            _aten._cdist_forward.default,
            _aten._ctc_loss.default,
            _aten._ctc_loss.Tensor,
        ),
        _HALVES,
    ),
    **dict.fromkeys(
        (_aten._fft_r2c.default, _aten._fft_c2c.default, _aten.complex.default, _aten.polar.default),
        _BFLOAT16,
    ),
}  # fmt: skip
"""Operator -> the dtypes of its first tensor for which it has no kernel."""
_CHECKED = frozenset({*ALIKE, *LABELS, *REFUSED})


def check_dtypes(func: Any, args: Any) -> None:
    """Raise RuntimeError if an operator's kernels refuse the dtypes of its arguments."""
    if func not in _CHECKED:
        return
    name = func.overloadpacket.__name__.strip("_")
    first = args[0].dtype
    if first in REFUSED.get(func, ()):
        raise RuntimeError(f"{name} is not implemented for {first}")
    if func in LABELS and args[1].dtype not in LABELS[func]:
        raise RuntimeError(f"{name}: expected labels of torch.int64, but got {args[1].dtype}")
    given = [args[place] for place in ALIKE.get(func, ()) if place < len(args)]
    others = [one for one in given if isinstance(one, Tensor) and one.dtype != first]
    # a single number that a mask fills in becomes one of the tensor's dtype
    if others and not (name.startswith("index_put") and others[0].numel() == 1):
        raise RuntimeError(
            f"{name}: expected tensors of one dtype, but got {first} and {others[0].dtype}"
        )
