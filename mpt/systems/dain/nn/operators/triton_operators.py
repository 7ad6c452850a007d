"""The operators of DAIN by Triton kernels: correlation, flow projection and adaptive interpolation.

`model.kernels: triton` puts them in the place of `correlation`, `projection` and `filter_interpolation` on a GPU. Those
are the reference, and planning always uses them. Each kernel (`triton_kernels`) computes one output pixel per lane and
holds nothing between: correlation makes no product per displacement, interpolation no position or weight per tap (the
reference holds 32 numbers per pixel for both).

Sums are in float32 in a fixed order. If many pixels add to one, numbers are added as 64-bit integers, scaled by a
power of two that is taken from the largest of them: integers add up to the same in any order, so results are the same
in every run although the order on a GPU is not. They are rounded to 2^-37 of the largest number at 4K, to less below.

Triton's interpreter (TRITON_INTERPRET=1) runs them on a CPU, which is how they are tested.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpt.systems.dain.nn.operators.correlation import RADIUS
from mpt.systems.dain.nn.operators.projection import fill_holes
from mpt.systems.dain.nn.operators.triton_kernels import (
    LANES,
    correlate_backward_kernel,
    correlate_kernel,
    filter_backward_kernel,
    filter_image_kernel,
    filter_kernel,
    project_backward_kernel,
    project_kernel,
)


def blocks(like_bchw: Tensor) -> int:
    """Return how many programs cover a sample's pixels."""
    return -(-like_bchw.shape[2] * like_bchw.shape[3] // LANES)


def integer_steps(largest: Tensor, like_bchw: Tensor) -> Tensor:
    """Return the power of two by which numbers up to `largest` are multiplied to be added as integers; float32, ().

    It is the largest by which all pixels' sixteen taps could be added to one place without exceeding 2^62.
    """
    bits = 62 - math.ceil(math.log2(16 * like_bchw.shape[2] * like_bchw.shape[3]))
    exponent = torch.frexp(largest.float().clamp_min(torch.finfo(torch.float32).tiny)).exponent
    return torch.ldexp(torch.ones((), device=largest.device), (bits - exponent).clamp(-126, 126))


class Correlation(torch.autograd.Function):
    """`correlation.Correlation` in one kernel each way."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, radius: int) -> Tensor:
        """Return (b, (2 radius + 1)^2, h, w), float32."""
        first, second = first.contiguous(), second.contiguous()
        ctx.save_for_backward(first, second)
        ctx.radius = radius
        batch, channels, height, width = first.shape
        count = (2 * radius + 1) ** 2
        out = first.new_empty(batch, count, height, width, dtype=torch.float32)
        correlate_kernel[(blocks(first), count, batch)](
            first, second, out, channels, height, width, radius, LANES
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients at both maps."""
        first, second = ctx.saved_tensors
        batch, channels, height, width = first.shape
        grad, at_first, at_second = (
            grad.contiguous(),
            torch.empty_like(first),
            torch.empty_like(second),
        )
        for other, out, sign in ((second, at_first, 1), (first, at_second, -1)):
            grid = (blocks(first), channels, batch)
            correlate_backward_kernel[grid](
                grad, other, out, channels, height, width, sign, ctx.radius, LANES
            )
        return at_first, at_second, None


class Projection(torch.autograd.Function):
    """`projection.Projection` in one kernel each way; sums are of integers, see `integer_steps`."""

    @staticmethod
    def forward(
        ctx: Any, flow: Tensor, weight: Tensor, original_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Return (b, 2, h, w) and (b, 1, h, w)."""
        flow, weight = flow.contiguous(), weight.contiguous()
        batch, _, height, width = flow.shape
        steps = integer_steps(weight.abs().max() * flow.abs().max().clamp_min(1.0), flow)
        sums = torch.zeros((batch, 3, height, width), dtype=torch.int64, device=flow.device)
        project_kernel[(blocks(flow), batch)](flow, weight, steps, sums, height, width, LANES)
        count = (sums[:, 2:].double() / steps).float()
        reached = sums[:, 2:] > 0
        quotient = sums[:, :2].double() / torch.where(reached, sums[:, 2:], 1).double()
        out = torch.where(reached, quotient.float(), 0)
        ctx.save_for_backward(flow, weight, out, count)
        ctx.original_gradient = original_gradient
        ctx.mark_non_differentiable(count)
        return out, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients at flow and weight."""
        flow, weight, out, count = ctx.saved_tensors
        batch, _, height, width = flow.shape
        reached = count > 0
        share = torch.where(reached, grad / torch.where(reached, count, 1), 0).contiguous()
        at_flow, at_weight = torch.empty_like(flow), torch.empty_like(weight)
        project_backward_kernel[(blocks(flow), batch)](
            flow,
            weight,
            out,
            share,
            at_flow,
            at_weight,
            height,
            width,
            ctx.original_gradient,
            LANES,
        )
        return at_flow, at_weight, None


class FilterInterpolation(torch.autograd.Function):
    """`filter_interpolation.interpolate_filtered` in one kernel forward and two backward."""

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, flow: Tensor, kernel: Tensor, original_gradient: bool
    ) -> Tensor:
        """Return (b, c, h, w) in the image's dtype; flow and kernel are float32."""
        image, flow, kernel = image.contiguous(), flow.contiguous(), kernel.contiguous()
        ctx.save_for_backward(image, flow, kernel)
        ctx.original_gradient = original_gradient
        batch, channels, height, width = image.shape
        out = torch.empty_like(image)
        filter_kernel[(blocks(image), batch)](
            image, flow, kernel, out, channels, height, width, LANES
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Return the gradients at image, flow and kernel."""
        image, flow, kernel = ctx.saved_tensors
        batch, channels, height, width = image.shape
        grad, grid = grad.contiguous(), (blocks(image), batch)
        at_image = at_flow = at_kernel = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            at_flow, at_kernel = torch.empty_like(flow), torch.empty_like(kernel)
            filter_backward_kernel[grid](
                image, flow, kernel, grad, at_flow, at_kernel, channels, height, width, LANES
            )
        if ctx.needs_input_grad[0]:
            steps = integer_steps(grad.abs().max() * kernel.abs().max().clamp_min(1.0), image)
            sums = torch.zeros(image.shape, dtype=torch.int64, device=image.device)
            filter_image_kernel[grid](
                flow,
                kernel,
                grad,
                steps,
                sums,
                channels,
                height,
                width,
                not ctx.original_gradient,
                LANES,
            )
            at_image = (sums.double() / steps).to(image.dtype)
        return at_image, at_flow, at_kernel, None


def correlate(first_bchw: Tensor, second_bchw: Tensor, radius: int = RADIUS) -> Tensor:
    """Return the cost volume (b, (2 radius + 1)^2, h, w), float32."""
    result: Tensor = Correlation.apply(first_bchw, second_bchw, radius)
    return result


def project_flow(
    flow_b2hw: Tensor, weight_b1hw: Tensor, *, fill: bool = False, original_gradient: bool = False
) -> Tensor:
    """Return the projected flow (b, 2, h, w) from float32 flow and weight, as `projection.project_flow`."""
    flow, count = Projection.apply(flow_b2hw, weight_b1hw, original_gradient)
    return fill_holes(flow, count) if fill else flow


def interpolate_filtered(
    image_bchw: Tensor, flow_b2hw: Tensor, kernel_bkhw: Tensor, *, original_gradient: bool = False
) -> Tensor:
    """Return the image moved against the flow through its own kernels (b, c, h, w), in the image's dtype."""
    result: Tensor = FilterInterpolation.apply(
        image_bchw, flow_b2hw, kernel_bkhw, original_gradient
    )
    return result
