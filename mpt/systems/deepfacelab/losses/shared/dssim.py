"""Structural dissimilarity, always in float32: the loss that half precision ruins.

DSSIM subtracts two nearly equal averages of squares. Between a flat picture at 0.85 and the same with noise of 0.005 it
is 0.013; this very formula in float16 makes it 0.47, in bfloat16 0.46 (`test_dssim.py`). So inputs are cast
up and autocast is switched off here, whatever the caller does.

The window is DeepFaceLab's: a softmax over -r^2 / (2 * 1.5^2), VALID, with k1 0.01 and k2 .03. It is separable, and
taps below float32's resolution of the largest are left out (at 44 pixels, 22 of 44 along each side are kept) while the
positions counted stay those of the full window. Maps are made contiguous: the depthwise kernel that PyTorch then takes
on CUDA has no TF32, which would lose as much as bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

SIGMA = 1.5
C1 = 0.01**2
C2 = 0.03**2
REACH = SIGMA * math.sqrt(60 * math.log(2))
"""Distance at which a tap is 2^-30 of the middle one."""


def dssim(first: Tensor, second: Tensor, size: int) -> Tensor:
    """Return (1 - SSIM) / 2 of each sample, float32 of shape (b,).

    Images are (b c h w) in [0, 1], not smaller than the window's `size` along either side.
    """
    return dssim_at(first, second, (size,))[0]


def dssim_at(first: Tensor, second: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return the dissimilarity for each window's size.

    Windows that are the same once cut (44 and 22 are) share one map, of which the larger counts the middle.
    """
    assert first.shape == second.shape
    assert min(first.shape[-2:]) >= max(sizes), "the window is larger than the image"
    maps: dict[int, tuple[int, Tensor]] = {}
    results = {}
    with torch.autocast(first.device.type, enabled=False):
        first, second = first.float().contiguous(), second.float().contiguous()
        for size in sorted(sizes):
            kept = size - 2 * spare(size)
            if kept not in maps:
                maps[kept] = size, similarity(first, second, size)
            smallest, similar = maps[kept]
            border = (size - smallest) // 2
            if border:
                similar = similar[..., border:-border, border:-border]
            results[size] = (1 - similar.mean(dim=(1, 2, 3))) / 2
    return [results[size] for size in sizes]


def formula(first: Tensor, second: Tensor, size: int) -> Tensor:
    """Compute DSSIM in the dtype of its inputs. Call `dssim`; this is separate so that a test can show why."""
    return (1 - similarity(first, second, size).mean(dim=(1, 2, 3))) / 2


def similarity(first: Tensor, second: Tensor, size: int) -> Tensor:
    """Return the map of SSIM at every position of the whole window."""
    means = _window_means(
        torch.cat((first, second, first * second, first.square() + second.square()), dim=1), size
    )
    first_mean, second_mean, product_mean, square_mean = means.chunk(4, dim=1)
    product = first_mean * second_mean * 2
    squares = first_mean.square() + second_mean.square()
    luminance = (product + C1) / (squares + C1)
    structure = (product_mean * 2 - product + C2) / (square_mean - squares + C2)
    return luminance * structure


def spare(size: int) -> int:
    """Return how many taps at each end of a window are too small to count."""
    return max(0, math.floor((size - 1) / 2 - REACH))


def window(
    size: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return one side of the separable window, of which the outer product is the window itself."""
    distance = (
        torch.arange(size, device=device, dtype=torch.promote_types(dtype, torch.float32))
        - (size - 1) / 2
    )
    return torch.softmax(-0.5 * distance.square() / SIGMA**2, dim=0).to(dtype)


def _window_means(maps_bchw: Tensor, size: int) -> Tensor:
    border = spare(size)
    kept = size - 2 * border
    taps = window(kept, maps_bchw.device, maps_bchw.dtype)
    if border:
        maps_bchw = maps_bchw[..., border:-border, border:-border]
    channels = maps_bchw.shape[1]
    rows = F.conv2d(
        maps_bchw, taps.view(1, 1, kept, 1).expand(channels, 1, kept, 1), groups=channels
    )
    return F.conv2d(rows, taps.view(1, 1, 1, kept).expand(channels, 1, 1, kept), groups=channels)
