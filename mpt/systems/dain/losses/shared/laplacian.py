"""The distance of two pictures' Laplacian pyramids, which RIFE is trained by.

Source: Bojanowski et al., "Optimizing the Latent Space of Generative Networks", 2018; in the form of
hzwer/ECCV2022-RIFE: five bands, a binomial filter of 5 x 5 taps with reflected borders, the low-pass rest not compared.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

LEVELS = 5
SMALLEST_SIDE = 33
"""Below it the filter is wider than the coarsest band."""
TAPS = (1.0, 4.0, 6.0, 4.0, 1.0)


def laplacian_distance(difference_bchw: Tensor) -> Tensor:
    """Return the sum over the bands of the mean absolute value of a difference of two pictures.

    The pyramid is linear: the bands of a difference are the differences of the bands. A mean over equal samples.
    """
    current, total = difference_bchw, difference_bchw.new_zeros(())
    for _ in range(LEVELS):
        smaller = smoothed(current)[..., ::2, ::2]
        total = (
            total
            + (current - enlarged(smaller)[..., : current.shape[-2], : current.shape[-1]])
            .abs()
            .mean()
        )
        current = smaller
    return total


def smoothed(x_bchw: Tensor) -> Tensor:
    """Return x filtered by the binomial kernel."""
    taps = x_bchw.new_tensor(TAPS) / sum(TAPS)
    kernel = (taps[:, None] * taps).expand(x_bchw.shape[1], 1, -1, -1)
    return F.conv2d(F.pad(x_bchw, (2, 2, 2, 2), mode="reflect"), kernel, groups=x_bchw.shape[1])


def enlarged(x_bchw: Tensor) -> Tensor:
    """Return x at twice the size: its pixels among zeros, filtered, times four."""
    batch, channels, height, width = x_bchw.shape
    spread = x_bchw.new_zeros(batch, channels, height, 2, width, 2)
    spread[..., 0, :, 0] = x_bchw
    return 4 * smoothed(spread.reshape(batch, channels, 2 * height, 2 * width))
