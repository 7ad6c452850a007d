"""Cost volume of two feature maps: how alike each pixel of the first is to the pixels around it in the second.

out[b, (dy + r) * (2r + 1) + (dx + r), y, x] = mean over channels of first[b, :, y, x] * second[b, :, y + dy, x + dx],
zero if the second has no such pixel; r = 4 in PWC-Net.

Backward: grad_first is the mean over displacements of grad_out times the displaced second, grad_second that of the
first, displaced back. Only the two inputs are kept for it: plain autograd would keep 81 products.

Works on blocks of 16 columns: for one row of displacements, the products of a block's pixels with the 24 pixels that
they can meet are one small matrix, of which the result is a diagonal band. So the work is a batched matrix product, and
what is held meanwhile is 3 times one map and 24 numbers per pixel. Under `precision.mode: tf32` a GPU takes these
products in TF32, as all of that mode; sums are float32.

Source: Sun et al., "PWC-Net", 2018; DAIN's correlation_package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

RADIUS = 4
BLOCK = 16
"""Columns of a block; at least twice the radius."""


@dataclass(frozen=True)
class Blocks:
    """How two maps (b, c, h, w) are cut: n = h * b * (blocks in a row) blocks, by rows first."""

    batch: int
    height: int
    width: int
    radius: int

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return max(BLOCK, 2 * self.radius)

    @property
    def count(self) -> int:
        """Blocks in a row."""
        return -(-self.width // self.columns)

    @property
    def reach(self) -> int:
        """Columns of the second map that a block's pixels can meet."""
        return self.columns + 2 * self.radius

    def of_first(self, x_bchw: Tensor) -> Tensor:
        """Return (n, columns, c)."""
        padded = F.pad(x_bchw, (0, self.count * self.columns - self.width))
        return padded.permute(2, 0, 3, 1).reshape(-1, self.columns, x_bchw.shape[1]).contiguous()

    def of_second(self, x_bchw: Tensor) -> Tensor:
        """Return (h + 2 radius, b * count, reach, c), of which h rows are the blocks' partners at a displacement."""
        beyond = self.count * self.columns - self.width + self.radius
        padded = F.pad(x_bchw, (self.radius, beyond, self.radius, self.radius))
        windows = padded.unfold(3, self.reach, self.columns)  # (b, c, rows, count, reach)
        return windows.permute(2, 0, 3, 4, 1).flatten(1, 2).contiguous()

    def partners(self, second: Tensor, row: int) -> Tensor:
        """Return the blocks (n, reach, c) that are met at a displacement row, a view."""
        return second[row : row + self.height].view(-1, *second.shape[2:])

    def band(self, products: Tensor) -> Tensor:
        """Return the view (n, columns, 2 radius + 1) of what lies at a displacement between 0 and twice the radius."""
        side = 2 * self.radius + 1
        return products.as_strided(
            (len(products), self.columns, side), (products.stride(0), self.reach + 1, 1)
        )

    def to_first(self, blocks: Tensor) -> Tensor:
        """Return (b, c, h, w) from (n, columns, c)."""
        apart = blocks.view(self.height, self.batch, self.count, self.columns, -1)
        return apart.permute(1, 4, 0, 2, 3).flatten(3)[..., : self.width]

    def to_second(self, blocks: Tensor) -> Tensor:
        """Return (b, c, h, w) from (h + 2 radius, b * count, reach, c), what lies in two blocks added up."""
        blocks = blocks.view(len(blocks), self.batch, self.count, self.reach, -1)
        joined = blocks.new_zeros(*blocks.shape[:2], self.count + 1, self.columns, blocks.shape[-1])
        joined[:, :, :-1] = blocks[:, :, :, : self.columns]
        joined[:, :, 1:, : 2 * self.radius] += blocks[:, :, :, self.columns :]
        rows = joined.flatten(2, 3).permute(1, 3, 0, 2)
        inner = slice(self.radius, self.radius + self.width)
        return rows[:, :, self.radius : self.radius + self.height, inner]


class Correlation(torch.autograd.Function):
    """The operator; `correlate` is its plain call."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, radius: int) -> Tensor:
        """Return (b, (2 radius + 1)^2, h, w)."""
        ctx.save_for_backward(first, second)
        ctx.radius = radius
        (batch, channels, height, width), side = first.shape, 2 * radius + 1
        cut = Blocks(batch, height, width, radius)
        ours, theirs = cut.of_first(first) / channels, cut.of_second(second)
        out = first.new_empty(batch, side, side, height, width)
        for row in range(side):
            products = torch.bmm(ours, cut.partners(theirs, row).mT)
            out[:, row] = cut.to_first(cut.band(products))
        return out.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients at both maps."""
        first, second = ctx.saved_tensors
        radius, (batch, channels, height, width) = ctx.radius, first.shape
        side = 2 * radius + 1
        cut = Blocks(batch, height, width, radius)
        ours, theirs = cut.of_first(first), cut.of_second(second)
        grad = grad.view(batch, side, side, height, width) / channels
        grad_ours, grad_theirs = torch.zeros_like(ours), torch.zeros_like(theirs)
        # outside the band they stay zero
        products = ours.new_zeros(len(ours), cut.columns, cut.reach)
        for row in range(side):
            cut.band(products).copy_(cut.of_first(grad[:, row]))
            grad_ours.baddbmm_(products, cut.partners(theirs, row))
            cut.partners(grad_theirs, row).baddbmm_(products.mT, ours)
        return cut.to_first(grad_ours), cut.to_second(grad_theirs), None


def correlate(first_bchw: Tensor, second_bchw: Tensor, radius: int = RADIUS) -> Tensor:
    """Return the cost volume (b, (2 radius + 1)^2, h, w)."""
    result: Tensor = Correlation.apply(first_bchw, second_bchw, radius)  # type: ignore[no-untyped-call]
    return result
