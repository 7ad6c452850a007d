"""Adaptive warping: bilinear interpolation whose four corners are each a learnt sum of four pixels.

The output pixel (x, y) looks at (x + u, y + v), with a and b the fractions past the floors. Its 4 x 4 taps begin one
pixel above and left of the floor and are clamped to the image. Each tap is weighted by the kernel at the output pixel
(16 channels, row-major, not normalised) and by the bilinear weight of the quadrant it lies in: (1-a)(1-b) top left,
a(1-b) top right, (1-a)b bottom left, ab bottom right. If the target is outside the image, or |u| >= W/2, or
|v| >= H/2, the input pixel is copied.

Backward: the derivative, floors taken as constant. DAIN's own kernel passes no gradient to the image where a pixel is
copied (the derivative is 1): `original_gradient=True` does the same.

Source: Bao et al., "MEMC-Net", 2019; DAIN's FilterInterpolation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpt.systems.dain.nn.operators.positions import gather_weighted, landing, pixel_numbers

TAPS = 4


def tap_positions(flow_b2hw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return pixel numbers (b, h, w, 16), bilinear weights of the taps (b, h, w, 16), and whether to interpolate."""
    height, width = flow_b2hw.shape[2:]
    x, y = landing(flow_b2hw)
    inside = (x >= 0) & (y >= 0) & (x <= width - 1) & (y <= height - 1)
    inside = inside & (flow_b2hw[:, 0].abs() < width / 2) & (flow_b2hw[:, 1].abs() < height / 2)
    x, y = torch.where(inside, x, 0), torch.where(inside, y, 0)
    left, top = x.detach().floor(), y.detach().floor()
    across, down = (x - left)[..., None], (y - top)[..., None]
    offset = torch.arange(TAPS, device=flow_b2hw.device, dtype=torch.int32) - (TAPS // 2 - 1)
    columns = (left.int()[..., None] + offset).clamp(0, width - 1)
    rows = (top.int()[..., None] + offset).clamp(0, height - 1)
    index = pixel_numbers(
        rows.repeat_interleave(TAPS, -1), columns.repeat(1, 1, 1, TAPS), height, width
    )
    half = (TAPS // 2,)
    weight_x = torch.cat(
        ((1 - across).expand(*across.shape[:-1], *half), across.expand(*across.shape[:-1], *half)),
        -1,
    )
    weight_y = torch.cat(
        ((1 - down).expand(*down.shape[:-1], *half), down.expand(*down.shape[:-1], *half)), -1
    )
    return index, (weight_y[..., :, None] * weight_x[..., None, :]).flatten(-2), inside


def gather_filtered(
    image_bchw: Tensor,
    taps: tuple[Tensor, Tensor, Tensor],
    kernel_bkhw: Tensor,
    *,
    original_gradient: bool = False,
) -> Tensor:
    """Return the image read at `tap_positions` through the kernels, in the image's dtype."""
    index, bilinear, inside = taps
    weight = (bilinear * kernel_bkhw.permute(0, 2, 3, 1)).to(image_bchw.dtype)
    moved = gather_weighted(image_bchw, index, weight)
    copied = image_bchw.detach() if original_gradient else image_bchw
    return torch.where(inside[:, None], moved, copied)


def interpolate_filtered(
    image_bchw: Tensor, flow_b2hw: Tensor, kernel_bkhw: Tensor, *, original_gradient: bool = False
) -> Tensor:
    """Return the image moved against the flow through its own kernels (b, c, h, w)."""
    return gather_filtered(
        image_bchw, tap_positions(flow_b2hw), kernel_bkhw, original_gradient=original_gradient
    )
