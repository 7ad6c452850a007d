"""Bilinear backward warping of feature maps, as PWC-Net does it between its levels.

Zero outside the image, and zero wherever less than 0.9999 of the four bilinear weights lies inside. The position is
taken through the range [-1, 1] and back, as `grid_sample(align_corners=True)` does, so that published weights meet the
rounding they were trained with; along a side of one pixel every position is that pixel, as there. Backward: the
derivative; the mask has none.

`warp` sums in a fixed order in its backward pass, which `grid_sample` on a GPU does not.
Source: Sun et al., "PWC-Net", 2018; DAIN's PWCNet.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mpt.systems.dain.nn.operators.positions import gather_weighted, landing, pixel_numbers

INSIDE = 0.9999


def through_unit_range(position: Tensor, size: int) -> Tensor:
    """Return a position in pixels after `grid_sample`'s roundings."""
    span = max(size - 1, 1)
    return ((2.0 * position / span - 1.0) + 1.0) / 2.0 * (size - 1)


def bilinear_taps(flow_b2hw: Tensor, *, border: bool = False) -> tuple[Tensor, Tensor]:
    """Return pixel numbers and weights (b, h, w, 4); weights are 0 for pixels outside.

    With `border` a position outside is that of the nearest pixel at the edge, as `padding_mode="border"`.
    """
    height, width = flow_b2hw.shape[2:]
    x, y = landing(flow_b2hw)
    x, y = through_unit_range(x, width), through_unit_range(y, height)
    if border:
        x, y = x.clamp(0, width - 1), y.clamp(0, height - 1)
    # A flow of any size, or NaN, must index inside the image; two pixels outside all weights are zero anyway.
    x, y = x.nan_to_num(-2).clamp(-2, width + 1), y.nan_to_num(-2).clamp(-2, height + 1)
    left, top = x.detach().floor(), y.detach().floor()
    across, down = x - left, y - top
    weight = torch.stack(
        ((1 - across) * (1 - down), across * (1 - down), (1 - across) * down, across * down), dim=-1
    )
    # Made on the device: a list would be copied there, which the host waits for.
    corners = torch.arange(2, device=flow_b2hw.device, dtype=torch.int32)
    columns = left.int()[..., None] + corners.repeat(2)
    rows = top.int()[..., None] + corners.repeat_interleave(2)
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    index = pixel_numbers(rows.clamp(0, height - 1), columns.clamp(0, width - 1), height, width)
    return index, torch.where(inside, weight, 0)


def warp(x_bchw: Tensor, flow_b2hw: Tensor, *, masked: bool = True) -> Tensor:
    """Return x read at each pixel plus the flow (b, c, h, w)."""
    index, weight = bilinear_taps(flow_b2hw)
    if masked:
        weight = weight * (weight.detach().sum(-1, keepdim=True) >= INSIDE)
    return gather_weighted(x_bchw, index, weight)


def sample_at_border(x_bchw: Tensor, flow_b2hw: Tensor) -> Tensor:
    """Return x read at each pixel plus the flow by `grid_sample`; outside it is the nearest pixel at the edge."""
    height, width = flow_b2hw.shape[2:]
    x, y = landing(flow_b2hw)
    span_x, span_y = max(width - 1, 1), max(height - 1, 1)
    grid = torch.stack((2.0 * x / span_x - 1.0, 2.0 * y / span_y - 1.0), dim=-1)
    return F.grid_sample(x_bchw, grid, mode="bilinear", padding_mode="border", align_corners=True)
