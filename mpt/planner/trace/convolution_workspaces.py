"""What cuDNN's convolutions ask for where there is room: copies in channels_last, transforms, parts of sums.

In float32 without TF32, on cards below compute capability 8.0 or where a program forbids it, dense windows of 3x3 are
computed by non-fused Winograd kernels, F(4 x 4, 3 x 3): input, output and weight lie transformed, 36 numbers for each
tile of 4 x 4 and channel and for each pair of channels (Lavin & Gray, "Fast algorithms for convolutional neural
networks", 2016). So published runs of V100s with cuDNN 7.6 peak to the digit, and a U-Net on an H100 with cuDNN 9.19.
What its other kernels without TF32 ask for is not known.

Its kernels for tensor cores read and write channels_last. A convolution of contiguous tensors with a window larger than
1x1 copies input, output and weight for each of its products; a window of 1x1 is a matrix product as it lies, unless it
has a stride. The product for the weight's gradient is divided among the multiprocessors, each with a tile of 128 x 128
numbers. cuDNN makes channels up to what its kernels take: 8 (4 in TF32), or 32 of a group in half.

The rule was looked for in what an H100's allocator was asked for in 129 steps. Contiguous calls that it has a size for
met it to 128 KiB in three of four forward and for the input's gradient, and to 8 MiB in nine of ten for the weight's.
Two thirds of the others asked for less than 1 MiB; the rest are gradients of 1x1 windows and depthwise ones in float16
(`docs/decisions/planner.md`). Without room cuDNN takes kernels that need less, so none of it is in what a step needs at
least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mpt.planner.device.routes import convolution_layout

TILE, TILE_BYTES = 128, 4 * 128 * 128
"""Rows and columns of a tile of the weight's gradient, and its bytes in float32."""
LEAST_CHANNELS = 4
"""Of fewer channels float32's kernels compute without copies, and all forward ones."""
HALF_STEP, FLOAT_STEP, GROUP_STEP = 8, 4, 32
"""Channels that kernels take at once, and of a group in half."""
WINOGRAD_SIDE, WINOGRAD_BYTES = 4, 4 * 6 * 6
"""Numbers of a tile's side in the output, and bytes of a transformed tile."""


def convolutions_in_tf32() -> bool:
    """Return whether torch's switches let float32 convolutions be in TF32, as they are now."""
    backends: Any = torch.backends  # whose newer members torch does not declare
    return bool(backends.cudnn.conv.fp32_precision == "tf32")


def workspaces(
    operator: str, args: Any, result: Any, multiprocessors: int, in_tf32: bool = True
) -> Iterator[int]:
    """Yield the bytes that each product of a convolution asks for, in order; float32 in TF32 or in full."""
    is_backward = operator == "aten::convolution_backward"
    output, source, weight = args[:3] if is_backward else (result, *args[:2])
    layout: Sequence[Any] = args[4:10] if is_backward else args[3:9]
    stride, _, dilation, is_transposed, _, groups = layout
    wanted: Sequence[bool] = args[10][:2] if is_backward else ()
    contiguous = convolution_layout(source, weight) == torch.contiguous_format
    if source.dtype == torch.float64 or not contiguous:
        return
    if source.dtype == torch.float32 and not in_tf32:
        if weight.shape[2:] == (3, 3) and max(*stride, *dilation, groups) == 1:
            images = source if is_transposed else output
            tiles = len(images) * math.prod(-(-side // WINOGRAD_SIDE) for side in images.shape[2:])
            first, second = weight.shape[:2]
            numbers = tiles * (first + second) + first * second
            yield from (WINOGRAD_BYTES * numbers for one in wanted or (True,) if one)
        return
    window, product = math.prod(weight.shape[2:]), output.nbytes + source.nbytes + weight.nbytes
    if window == 1 and groups == 1:
        if max(stride) > 1:
            yield from (product for one in wanted or (True,) if one)
        return
    if groups > 1 and weight.shape[1] == 1:
        return
    is_half = source.element_size() == 2
    inner, outer = source.shape[1] // groups, output.shape[1] // groups
    if is_transposed:
        inner, outer = outer, inner
    if groups > 1 and is_half:
        product += (product - weight.nbytes) * (_up_to(inner, GROUP_STEP) - inner) // inner
    if not is_backward:
        if inner >= LEAST_CHANNELS:
            yield product
        return
    if wanted[0]:
        yield product
    if wanted[1] and (is_half or inner >= LEAST_CHANNELS):
        added = _up_to(inner, HALF_STEP if is_half else FLOAT_STEP) - inner
        tiles = groups * -(-outer // TILE) * -(-inner * window // TILE)
        parts = multiprocessors // tiles
        yield product + source.nbytes * added // inner + (parts > 1) * parts * tiles * TILE_BYTES


def _up_to(number: int, step: int) -> int:
    """Return the next multiple of a step."""
    return -(-number // step) * step
