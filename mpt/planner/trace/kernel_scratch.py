"""Scratch that kernels take for the time of one call, by operator: copies of arguments, parts of sums, gradients.

- Some kernels read contiguous tensors alone and copy others (`SoftMax.cu`, `layer_norm_kernel.cu`, `Pool.h`,
  `UpSample*.cu`); a roll along several dimensions makes a tensor for each (`TensorTransformations.cu`).
- The backward passes of attention add gradients of the queries up in float32: flash attention in rows rounded up to 128
  and heads to 32 (`flash_api.cpp`), the memory-efficient kernels in tiles of 64 x 64 (`kernel_backward.h`), cuDNN as
  the queries lie, with gradients of keys and values for each head where heads share them.
- The gradient of a table that is looked up sorts the indices, and adds rows up in float32: one for each ten indices and
  one for each that may differ (`EmbeddingBackwardKernel.cu`).
- The product of many rows with a weight of bitsandbytes in 4 bits is taken with the whole weight in the rows' dtype.
- A Fourier transform along several dimensions has a workspace of its data's size (`SpectralOps.cpp` asks cuFFT).
- Sums: `mpt.planner.trace.reductions`.

Except for flash attention's, bitsandbytes' and cuFFT's these are the sizes that an H100's allocator was asked for
(`scripts/card/operator_scratch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpt.planner.device.routes import convolution_layout
from mpt.planner.trace.kept_sizes import ELEMENTWISE, least_bytes

ATTENTION = "_scaled_dot_product_"
"""With which the names of all kernels of attention begin."""
COPIED = (
    *("_softmax", "_log_softmax", "_log_softmax_backward_data"),
    *("native_layer_norm", "native_layer_norm_backward", "im2col", "col2im"),
)
"""Operators that read their tensors contiguous: those of a backward pass the first two."""
IN_LAYOUT = {
    "max_pool2d_with_indices": (0, 0),
    "max_pool2d_with_indices_backward": (1, 0, 1),
    "max_pool3d_with_indices_backward": (1, 0, 1),
    "avg_pool2d": (0, 0),
    "avg_pool2d_backward": (1, 0),
    **{f"upsample_{kind}_backward": (0, 0) for kind in ("bilinear2d", "bicubic2d", "nearest2d")},
}
"""Operators that read channels_last too -> the argument that decides the layout, and those that are read in it."""
FEW_INDICES, ROWS_ADDED_AT_ONCE = 3072, 10
FEW_ROWS = 32
"""Of a table: for these no rows are added up apart, for 512 they are."""
SORTED_BYTES = 80
"""For each index: six arrays of integers and what sorting takes."""
ROWS_IN_FOUR_BITS = 16
"""Up to so many rows bitsandbytes multiplies the packed weight itself; on cards without HBM it does up to 512."""
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def scratch_bytes(operator: str, args: Any, result: Any) -> int:
    """Return the bytes of scratch of a call, 0 for operators that have none or are not known here."""
    known = _RULES.get(operator)
    return 0 if known is None else known(args, result)


def _copies(operator: str) -> Callable[[Any, Any], int]:
    count = 2 if "backward" in operator else 1

    def copied(args: Any, result: Any) -> int:
        return sum(one.nbytes for one in args[:count] if not one.is_contiguous())

    return copied


def _softmax_backward(args: Any, result: Any) -> int:
    """The product of gradient and output is a tensor of its own, in the gradient's layout."""
    gradient, output = args[:2]
    copies = [one for one in (gradient, output) if not one.is_contiguous()]
    return sum(one.nbytes for one in (gradient, *copies))


def _in_layout(deciding: int, *read: int) -> Callable[[Any, Any], int]:
    def copied(args: Any, result: Any) -> int:
        last = LAST.get(args[deciding].dim(), torch.contiguous_format)
        plain = args[deciding].is_contiguous() or not args[deciding].is_contiguous(
            memory_format=last
        )
        layout = torch.contiguous_format if plain else last
        tensors = (args[index] for index in read)
        return sum(one.nbytes for one in tensors if not one.is_contiguous(memory_format=layout))

    return copied


def _convolved(args: Any, result: Any) -> int:
    """Convolutions read all of their tensors in one layout (`Convolution.cpp`)."""
    return _read_in_one(args[:2], args[:2])


def _convolved_backward(args: Any, result: Any) -> int:
    return _read_in_one(args[1:3], args[:3])


def _read_in_one(deciding: Sequence[Tensor], read: Sequence[Tensor]) -> int:
    is_double = deciding[0].dtype == torch.float64
    layout = torch.contiguous_format if is_double else convolution_layout(*deciding)
    return sum(one.nbytes for one in read if not one.is_contiguous(memory_format=layout))


def _rolled(args: Any, result: Tensor) -> int:
    shifts = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    return result.nbytes * (max(0, len(shifts) - 1) + int(not args[0].is_contiguous()))


def _asked_for_rows(args: Any, result: Tensor) -> int:
    """A softmax that asks which rows are masked throughout notes it for each element, and for each row."""
    return int(result.numel() + result.numel() // max(1, result.shape[args[1]]))


def _looked_up_backward(args: Any, result: Any) -> int:
    gradient, indices, rows = args[:3]
    count, copied = indices.numel(), 0 if gradient.is_contiguous() else int(gradient.nbytes)
    if count <= FEW_INDICES:
        return max(1, copied)  # the events of a step are the same at each batch
    parts = count // ROWS_ADDED_AT_ONCE + min(count, rows)
    summed = 4 * parts * gradient.shape[-1] if rows > FEW_ROWS else 0
    return copied + int(summed + SORTED_BYTES * count)


def _elementwise(args: Any, result: Tensor) -> int:
    return 0 if result.dim() else least_bytes("aten::mse_loss", args, result)


def _flash(args: Any, result: Any) -> int:
    batch, heads, length, size = args[1].shape
    rows = -(-length // 128) * 128
    return int(4 * batch * heads * rows * (-(-size // 32) * 32 + 1))


def _memory_efficient(args: Any, result: Any) -> int:
    batch, heads, length, size = args[1].shape
    tiles, part = -(-length // 64), 4 * batch * heads * length
    found = part + batch * heads * tiles * (64 * 4 * 64 * -(-size // 64) + 16)
    # products of output and gradient, which the kernel of halves adds up itself
    if args[1].dtype == torch.float32:
        found += part * (size + 1)
    return int(found)


def _cudnn(args: Any, result: Any) -> int:
    batch, heads, length, size = args[1].shape
    keys = args[2]
    found = 4 * batch * heads * length * (size + 1)
    if keys.shape[1] != heads:
        found += batch * heads * keys.shape[2] * (size + args[3].shape[3]) * keys.element_size()
    return int(found)


def _transformed(args: Any, result: Tensor) -> int:
    return result.nbytes if len(args[1]) > 1 else 0


def _four_bits(args: Any, result: Tensor) -> int:
    """Return the bytes of the weight, and for scales that are packed too those as they are (`ops.py`, 0.50)."""
    values, _, (rows, columns), scales, block = args[:5]
    if result.numel() <= ROWS_IN_FOUR_BITS * rows:
        return 0
    blocks = rows * columns // block
    unpacked = 2 * 4 * blocks if scales.numel() < blocks else 0
    return int(values.element_size() * rows * columns + unpacked)


_RULES: dict[str, Callable[[Any, Any], int]] = {
    **{f"aten::{name}": _copies(name) for name in COPIED},
    **{f"aten::{name}": _in_layout(*indices) for name, indices in IN_LAYOUT.items()},
    "aten::_softmax_backward_data": _softmax_backward,
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(("aten::convolution", "aten::_convolution"), _convolved),
    "aten::convolution_backward": _convolved_backward,
    "aten::embedding_dense_backward": _looked_up_backward,
    "aten::roll": _rolled,
    "aten::_fft_c2c": _transformed,
    "bitsandbytes::gemm_4bit": _four_bits,
    "aten::_safe_softmax": _asked_for_rows,
    f"aten::{ATTENTION}flash_attention_backward": _flash,
    f"aten::{ATTENTION}efficient_attention_backward": _memory_efficient,
    f"aten::{ATTENTION}cudnn_attention_backward": _cudnn,
}
