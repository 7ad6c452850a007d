"""Bilinear resizing whose gradient is summed in a fixed order on a GPU too.

Each output pixel is a weighted sum of two rows and two columns, so resizing is a product by a matrix on either side and
its gradient the product by their transposes. torch's own backward kernel for CUDA adds by atomics, in any order, and a
resumed training would not repeat.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mpt.precision.shared.float32_modules import full_precision


def resized(x_bchw: Tensor, factor: float) -> Tensor:
    """Return x enlarged by a factor, bilinearly with half-pixel centres: (b, c, h factor, w factor)."""
    if x_bchw.is_cuda and x_bchw.requires_grad and torch.backends.cudnn.deterministic:
        result: Tensor = Resizing.apply(x_bchw, factor)  # type: ignore[no-untyped-call]
        return result
    return _interpolated(x_bchw, factor)


def _interpolated(x_bchw: Tensor, factor: float | tuple[float, float]) -> Tensor:
    return F.interpolate(x_bchw, scale_factor=factor, mode="bilinear", align_corners=False)


class Resizing(torch.autograd.Function):
    """torch's forward pass, and a backward pass of two matrix products."""

    @staticmethod
    def forward(ctx: Any, x_bchw: Tensor, factor: float) -> Tensor:
        """Return the resized maps."""
        ctx.factor, ctx.sides, ctx.dtype = factor, x_bchw.shape[-2:], x_bchw.dtype
        return _interpolated(x_bchw, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_bchw: Tensor) -> tuple[Tensor, None]:
        """Return the gradient at the maps, added up in float32 or wider."""
        with full_precision(grad_bchw.device.type):
            grad = grad_bchw.to(torch.promote_types(grad_bchw.dtype, torch.float32))
            height, width = (_weights(side, ctx.factor, grad) for side in ctx.sides)
            return (height @ (grad @ width.T)).to(ctx.dtype), None


def _weights(side: int, factor: float, like: Tensor) -> Tensor:
    """Return what each of the outputs of a row takes from each of its pixels: (side, outputs)."""
    unit = torch.eye(side, dtype=like.dtype, device=like.device)
    return _interpolated(unit[None, :, :, None], (factor, 1.0))[0, :, :, 0]
