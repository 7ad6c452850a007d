"""Reading an image at computed positions, as one weighted sum of pixels per output pixel.

Every operator of DAIN that moves pixels is "output pixel n = sum over k of weight[n, k] * pixel[index[n, k]]".
`gather_weighted` does that with `embedding_bag`, which sums in one kernel: no image is held per tap (filter
interpolation has 16), and its backward adds up in a fixed order on a GPU, where `grid_sample`'s does not.

Backward: at the pixels the transposed sum, at the weights the inner product of gradient and pixel over channels.

Shapes: b batch, c channels, h height, w width, k taps; n = b*h*w output pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    """Return the number of each pixel among all pixels of the batch, from int64 rows and columns (b, h, w, k)."""
    sample = torch.arange(len(row_bhwk), device=row_bhwk.device)[:, None, None, None]
    return (sample * height + row_bhwk) * width + column_bhwk


def gather_weighted(image_bchw: Tensor, index_bhwk: Tensor, weight_bhwk: Tensor) -> Tensor:
    """Return (b, c, h, w), of which each pixel is the weighted sum of k pixels of the image.

    The image may have another height and width than the output; `index` counts its pixels over the whole batch.
    """
    channels = image_bchw.shape[1]
    batch, height, width, taps = index_bhwk.shape
    pixels = image_bchw.permute(0, 2, 3, 1).reshape(-1, channels)
    summed = F.embedding_bag(
        index_bhwk.reshape(-1, taps), pixels, mode="sum", per_sample_weights=weight_bhwk.reshape(-1, taps)
    )
    return summed.view(batch, height, width, channels).permute(0, 3, 1, 2).contiguous()
