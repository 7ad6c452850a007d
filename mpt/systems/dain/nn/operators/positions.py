"""Reading an image at computed positions, as one weighted sum of pixels per output pixel.

Every operator of DAIN that moves pixels is "output pixel n = sum over k of weight[n, k] * pixel[index[n, k]]".
`gather_weighted` does that with `embedding_bag`, which sums in one kernel: no image is held per tap (filter
interpolation has 16).

Backward: at the pixels the transposed sum, which is such a gather too once the taps are sorted by the pixel they read.
So it adds up in a fixed order on a GPU, where `grid_sample`'s backward does not, and costs a third of `embedding_bag`'s
own. At the weights the inner product of gradient and pixel over channels. Kept for it: pixel numbers and weights, and
the image where the weights have a gradient.

Shapes: b batch, c channels, h height, w width, k taps; n = b*h*w output pixels. Pixel numbers are int32: half the
memory, and faster to sort.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def pixel_axes(like_bchw: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns (1, 1, w) and rows (1, h, 1) as numbers of the tensor's dtype."""
    height, width = like_bchw.shape[-2:]
    column = torch.arange(width, device=like_bchw.device, dtype=like_bchw.dtype)
    row = torch.arange(height, device=like_bchw.device, dtype=like_bchw.dtype)
    return column[None, None, :], row[None, :, None]


def landing(flow_b2hw: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each pixel goes: x and y (b, h, w), in pixels."""
    column, row = pixel_axes(flow_b2hw)
    return column + flow_b2hw[:, 0], row + flow_b2hw[:, 1]


def pixel_numbers(row_bhwk: Tensor, column_bhwk: Tensor, height: int, width: int) -> Tensor:
    """Return the number of each pixel among all pixels of the batch, from int32 rows and columns (b, h, w, k)."""
    sample = torch.arange(len(row_bhwk), device=row_bhwk.device, dtype=row_bhwk.dtype)[
        :, None, None, None
    ]
    return (sample * height + row_bhwk) * width + column_bhwk


class WeightedGather(torch.autograd.Function):
    """Rows (n, c) that are weighted sums of k rows of `pixels` (p, c); `gather_weighted` is its call on images."""

    @staticmethod
    def forward(ctx: Any, pixels: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """Return (n, c) for index and weight (n, k)."""
        at_weight = ctx.needs_input_grad[2]
        ctx.save_for_backward(pixels if at_weight else None, index, weight)
        ctx.count = len(pixels)
        return F.embedding_bag(index, pixels, mode="sum", per_sample_weights=weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        """Return the gradients at the pixels and at the weights."""
        pixels, index, weight = ctx.saved_tensors
        at_pixels, _, at_weight = ctx.needs_input_grad
        grad = grad.contiguous()
        grad_pixels = scatter_weighted(grad, index, weight, ctx.count) if at_pixels else None
        grad_weight = None
        if at_weight:
            taps = [(pixels.index_select(0, tap) * grad).sum(1) for tap in index.unbind(1)]
            grad_weight = torch.stack(taps, dim=1)
        return grad_pixels, None, grad_weight


def scatter_weighted(rows: Tensor, index: Tensor, weight: Tensor, count: int) -> Tensor:
    """Return (count, c): the transposed sum of `WeightedGather`, in the order of rows and taps."""
    numbers, order = index.reshape(-1).sort(stable=True)
    starts = torch.searchsorted(
        numbers, torch.arange(count, device=index.device, dtype=index.dtype), out_int32=True
    )
    source = (order // index.shape[1]).to(index.dtype)
    return F.embedding_bag(
        source, rows, starts, mode="sum", per_sample_weights=weight.reshape(-1)[order]
    )


def summed_taps(pixels: Tensor, index_bhwk: Tensor, weight_bhwk: Tensor) -> Tensor:
    """Return (b, h, w, c): the same sum tap by tap, in operators that ONNX has."""
    taps = zip(index_bhwk.unbind(-1), weight_bhwk.unbind(-1), strict=True)
    read = (pixels[index.long()] * weight[..., None] for index, weight in taps)
    return functools.reduce(torch.add, read)


def gather_weighted(image_bchw: Tensor, index_bhwk: Tensor, weight_bhwk: Tensor) -> Tensor:
    """Return (b, c, h, w), of which each pixel is the weighted sum of k pixels of the image.

    The image may have another height and width than the output; `index` counts its pixels over the whole batch.
    """
    channels = image_bchw.shape[1]
    batch, height, width, taps = index_bhwk.shape
    pixels = image_bchw.permute(0, 2, 3, 1).reshape(-1, channels)
    if torch.onnx.is_in_onnx_export():  # which makes a loop over output pixels of `embedding_bag`
        return summed_taps(pixels, index_bhwk, weight_bhwk).permute(0, 3, 1, 2)
    summed: Tensor = WeightedGather.apply(  # type: ignore[no-untyped-call]
        pixels, index_bhwk.reshape(-1, taps), weight_bhwk.reshape(-1, taps)
    )
    return summed.view(batch, height, width, channels).permute(0, 3, 1, 2).contiguous()
