"""PSNR, SSIM and interpolation error per picture, equal to scikit-image's `peak_signal_noise_ratio` and
`structural_similarity(channel_axis=..., data_range=1)`.

Pictures of several sizes may be padded to one: a mask says which pixels count. SSIM's 7 x 7 windows are those that lie
inside the mask. Computed in float64, as scikit-image does.

Published figures round to 8 bits first, `rounded`; "IE" is the mean absolute difference of those, in grey levels.
Source: Wang et al., "Image quality assessment", 2004, with a uniform window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mpt.metrics.shared.float64 import in_float64

WINDOW = 7
K1, K2 = 0.01, 0.03


def rounded(image: Tensor) -> Tensor:
    """Return pictures clipped to [0, 1] and rounded to 8 bits, half to even."""
    return image.float().clamp(0, 1).mul(255).round().div(255)


def size_mask(size_b2: Tensor, height: int, width: int) -> Tensor:
    """Return (b, 1, h, w), true where a padded picture is real."""
    rows = torch.arange(height, device=size_b2.device)[None, :, None] < size_b2[:, 0, None, None]
    columns = torch.arange(width, device=size_b2.device)[None, None, :] < size_b2[:, 1, None, None]
    return (rows & columns)[:, None]


def masked_mean(value_bchw: Tensor, mask_b1hw: Tensor | None) -> Tensor:
    """Return the mean per picture (b,) over the pixels of the mask."""
    if mask_b1hw is None:
        return value_bchw.mean((1, 2, 3))
    kept = torch.where(mask_b1hw, value_bchw, 0).sum((1, 2, 3))
    return kept / (mask_b1hw.sum((1, 2, 3)) * value_bchw.shape[1])


def peak_signal_to_noise(one: Tensor, other: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return PSNR in dB per picture (b,), for values in [0, 1]."""
    error = masked_mean((in_float64(one) - in_float64(other)).square(), mask)
    return -10 * torch.log10(error)


def interpolation_error(one: Tensor, other: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean absolute difference per picture (b,), in grey levels of 255."""
    return 255 * masked_mean((in_float64(one) - in_float64(other)).abs(), mask)


def structural_similarity(one: Tensor, other: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return SSIM per picture (b,), for values in [0, 1]; sides are at least 7."""
    x, y = in_float64(one), in_float64(other)
    unbiased = WINDOW**2 / (WINDOW**2 - 1)

    def window_mean(value: Tensor) -> Tensor:
        return F.avg_pool2d(value, WINDOW, stride=1)

    mean_x, mean_y = window_mean(x), window_mean(y)
    var_x = unbiased * (window_mean(x * x) - mean_x * mean_x)
    var_y = unbiased * (window_mean(y * y) - mean_y * mean_y)
    covariance = unbiased * (window_mean(x * y) - mean_x * mean_y)
    c1, c2 = K1**2, K2**2
    similarity = ((2 * mean_x * mean_y + c1) * (2 * covariance + c2)) / (
        (mean_x.square() + mean_y.square() + c1) * (var_x + var_y + c2)
    )
    # a window counts where its last pixel is real: padding is at the right and the bottom
    if mask is not None:
        mask = mask[:, :, WINDOW - 1 :, WINDOW - 1 :]
    return masked_mean(similarity, mask)
