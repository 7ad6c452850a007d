"""Cost volume of two feature maps: how alike each pixel of the first is to the pixels around it in the second.

out[b, (dy + r) * (2r + 1) + (dx + r), y, x] = mean over channels of first[b, :, y, x] * second[b, :, y + dy, x + dx],
zero where the second has no such pixel; r = 4 in PWC-Net.

Backward: grad_first is the mean over displacements of grad_out times the displaced second, grad_second that of the
first, displaced back. Only the two inputs are kept for it: plain autograd would keep 81 products.

Works row by row of displacements, so that what is held meanwhile is (2r + 1) times the features and not its square.
Source: Sun et al., "PWC-Net", 2018; DAIN's correlation_package.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

RADIUS = 4


def displaced(padded_bchw: Tensor, row: int, side: int, height: int, width: int) -> Tensor:
    """Return a view (b, c, side, h, w): the padded map's window at displacement row `row`, for every column."""
    strip = padded_bchw[:, :, row : row + height]
    return strip.unfold(3, width, 1)[:, :, :, :side].permute(0, 1, 3, 2, 4)


class Correlation(torch.autograd.Function):
    """The operator; `correlate` is its plain call."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, radius: int) -> Tensor:
        """Return (b, (2 radius + 1)^2, h, w)."""
        ctx.save_for_backward(first, second)
        ctx.radius = radius
        side, (height, width) = 2 * radius + 1, first.shape[2:]
        padded = F.pad(second, (radius,) * 4)
        rows = [(first[:, :, None] * displaced(padded, row, side, height, width)).mean(1) for row in range(side)]
        return torch.cat(rows, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients at both maps."""
        first, second = ctx.saved_tensors
        radius, (batch, channels, height, width) = ctx.radius, first.shape
        side = 2 * radius + 1
        grad = grad.view(batch, side, side, height, width) / channels
        padded = F.pad(second, (radius,) * 4)
        grad_first, grad_padded = torch.zeros_like(first), torch.zeros_like(padded)
        for row in range(side):
            part = grad[:, row, None]  # (b, 1, side, h, w)
            grad_first += (part * displaced(padded, row, side, height, width)).sum(2)
            back = part * first[:, :, None]
            for column in range(side):
                grad_padded[:, :, row : row + height, column : column + width] += back[:, :, column]
        return grad_first, grad_padded[:, :, radius : radius + height, radius : radius + width], None


def correlate(first_bchw: Tensor, second_bchw: Tensor, radius: int = RADIUS) -> Tensor:
    """Return the cost volume (b, (2 radius + 1)^2, h, w)."""
    result: Tensor = Correlation.apply(first_bchw, second_bchw, radius)  # type: ignore[no-untyped-call]
    return result
