"""Dtypes that an operator's kernels refuse, which torch's rules for fake tensors let pass.

Without this a step is planned that ends at its first product of a half and a float32 tensor, and autocast is proposed
for one whose sums (`zeros.index_add_(0, places, messages)`) it breaks. The checks are those that kernels of the CPU and
of CUDA share, found by calling 340 functions with each dtype in each place on fake and on real tensors, with torch
2.13. Norms are the exception: of a half input and float32 weights those of the CPU take all, of CUDA only batch
normalization (`aten/src/ATen/native/cuda/layer_norm_kernel.cu`, `group_norm_kernel.cu` and `Normalization.cu`).
"""

from __future__ import annotations

from collections.abc import Sequence
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
    **dict.fromkeys((_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default), (0, 2)),
    _aten.huber_loss_backward.default: (0, 1, 2),
    **dict.fromkeys(
        (_aten._embedding_bag.default, _aten._embedding_bag_forward_only.default), (0, 6)
    ),
    _aten.linalg_cross.default: (0, 1),
    _aten._weight_norm_interface.default: (0, 1),
    _aten._cdist_forward.default: (0, 1),
    **dict.fromkeys((_aten.put.default, _aten.put_.default), (0, 2)),
    **dict.fromkeys((_aten.index_reduce.default, _aten.index_reduce_.default), (0, 3)),
    _aten.mkldnn_rnn_layer.default: (0, 1, 2, 3, 4, 5, 6),
}
"""Operator -> the places of tensors that must have one dtype."""
_LONG = (torch.int64,)
_INTEGERS = (torch.int64, torch.int32)
INTEGERS: dict[Any, tuple[int, tuple[torch.dtype, ...]]] = {
    **dict.fromkeys(
        (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default),
        (1, (torch.int64, torch.uint8)),
    ),
    _aten.index_select.default: (2, _INTEGERS),
    **dict.fromkeys((_aten.index_add.default, _aten.index_add_.default), (2, _INTEGERS)),
    **dict.fromkeys((_aten.index_copy.default, _aten.index_copy_.default), (2, _LONG)),
    **dict.fromkeys((_aten.index_fill.int_Scalar, _aten.index_fill_.int_Scalar), (2, _LONG)),
}
"""Operator -> the place of its labels or indices, and their dtypes."""
_HALVES = torch.float16, torch.bfloat16
_BFLOAT16 = (torch.bfloat16,)
_BOOL = (torch.bool,)
_INTEGER_PICTURES = torch.int64, torch.int32, torch.bool
_WHOLE = (*_INTEGER_PICTURES, torch.uint8)
_NORMS: dict[Any, tuple[int, bool]] = {
    _aten.native_layer_norm.default: (2, False),
    _aten.native_group_norm.default: (1, False),
    _aten.native_batch_norm.default: (1, True),
}
"""Norm -> the place of its weight, after which the bias is; whether CUDA's takes float32 weights of a half input."""
_FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
_ARITHMETIC: dict[Any, tuple[torch.dtype, ...]] = {
    **dict.fromkeys((_aten.sub.Tensor, _aten.sub_.Tensor), _BOOL),
    **{
        getattr(getattr(_aten, f"bitwise_{name}{place}"), kind): _FLOATS
        for name in ("and", "or", "xor")
        for place in ("", "_")
        for kind in ("Tensor", "Scalar")
    },
}
"""Operator -> the dtypes that none of its tensors may have."""
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
            _aten.linalg_eig.default,
            _aten.linalg_solve_triangular.default,
            _aten._cholesky_solve_helper.default,
            _aten._pdist_forward.default,
        ),
        _HALVES,
    ),
    **dict.fromkeys(
        (
            _aten._softmax.default,
            _aten._log_softmax.default,
            _aten.log_sigmoid_forward.default,
            _aten.gelu.default,
            _aten.silu.default,
            _aten.mish.default,
            _aten.hardswish.default,
            _aten.hardsigmoid.default,
            _aten.elu.default,
            _aten.softplus.default,
            _aten.glu.default,
            _aten._adaptive_avg_pool2d.default,
            _aten._adaptive_avg_pool3d.default,
            _aten.var.correction,
            _aten.std.correction,
            _aten.var_mean.correction,
            _aten.std_mean.correction,
            _aten.multinomial.default,
            _aten.nll_loss_forward.default,
            _aten.nll_loss2d_forward.default,
        ),
        _WHOLE,
    ),
    **dict.fromkeys(
        (
            _aten.upsample_nearest1d.default,
            _aten.upsample_nearest2d.default,
            _aten._upsample_nearest_exact2d.default,
            _aten.upsample_nearest3d.default,
            _aten.upsample_linear1d.default,
            _aten.upsample_bilinear2d.default,
            _aten.upsample_bicubic2d.default,
            _aten.upsample_trilinear3d.default,
        ),
        _INTEGER_PICTURES,
    ),
    **dict.fromkeys((_aten.im2col.default, _aten.col2im.default), _INTEGERS),
    **dict.fromkeys(
        (_aten.quantize_per_tensor.default, _aten.quantize_per_channel.default),
        (*_HALVES, torch.float64),
    ),
    **dict.fromkeys((_aten.neg.default, _aten.argmax.default, _aten.argmin.default), _BOOL),
    **dict.fromkeys(
        (_aten._fft_r2c.default, _aten._fft_c2c.default, _aten.complex.default, _aten.polar.default),
        _BFLOAT16,
    ),
}  # fmt: skip
"""Operator -> the dtypes of its first tensor for which it has no kernel."""
_ON_CPU = {_aten._fused_moving_avg_obs_fq_helper.default: (*_HALVES, torch.float64)}
"""Operator -> the dtypes of its first tensor that a CPU's kernel refuses."""
_CHECKED = frozenset({*_ON_CPU, *ALIKE, *INTEGERS, *REFUSED, *_NORMS, *_ARITHMETIC})


def check_dtypes(func: Any, args: Any) -> None:
    """Raise RuntimeError if an operator's kernels refuse the dtypes of its arguments."""
    if func not in _CHECKED:
        return
    name = func.overloadpacket.__name__.strip("_")
    first = args[0].dtype
    if first in REFUSED.get(func, ()):
        raise RuntimeError(f"{name} is not implemented for {first}")
    if func in INTEGERS:
        place, dtypes = INTEGERS[func]
        if args[place].dtype not in dtypes:
            raise RuntimeError(
                f"{name}: expected integers of {dtypes[0]}, but got {args[place].dtype}"
            )
    if first in _ON_CPU.get(func, ()) and args[0].device.type == "cpu":
        raise RuntimeError(f"{name} is not implemented for {first} on a CPU")
    if func in _NORMS:
        _check_norm(name, args[0], *_NORMS[func], args)
    refused = _ARITHMETIC.get(func, ())
    found = [one.dtype for one in args[:2] if isinstance(one, Tensor) and one.dtype in refused]
    if found:
        raise RuntimeError(f"{name} is not implemented for {found[0]}")
    given = [args[place] for place in ALIKE.get(func, ()) if place < len(args)]
    _check_alike(name, given)


def _check_alike(name: str, given: Sequence[Any]) -> None:
    tensors = [one for one in given if isinstance(one, Tensor)]
    others = [one for one in tensors if one.dtype != tensors[0].dtype]
    # a single number that a mask fills in becomes one of the tensor's dtype
    if others and not (name.startswith("index_put") and others[0].numel() == 1):
        raise RuntimeError(
            f"{name}: expected tensors of one dtype, but got {tensors[0].dtype} and {others[0].dtype}"
        )


def _check_norm(name: str, values: Tensor, place: int, takes_mixed: bool, args: Any) -> None:
    """Let float32 weights pass with a half input where kernels take them; else all must have one dtype.

    Statistics of a batch, which follow the weights, are of the weights' dtype on a CPU and of any on CUDA.
    """
    is_on_cpu = values.device.type == "cpu"
    count = 4 if takes_mixed and is_on_cpu else 2
    weights = [one for one in args[place : place + count] if one is not None]
    takes_mixed |= is_on_cpu
    is_mixed = values.dtype in _HALVES and all(one.dtype == torch.float32 for one in weights)
    if not (is_mixed and takes_mixed):
        _check_alike(name, [values, *weights])
