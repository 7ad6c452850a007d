"""Depth-aware flow projection: from the flow at frame 0 to the flow at the frame between, near surfaces first.

Each pixel travels along its flow F with the weight w (its inverse depth). If it lands at (x, y) with 0 <= x <= W - 1
and 0 <= y <= H - 1, it adds -w F and w to the four pixels at floor(x), floor(x) + 1 and floor(y), floor(y) + 1,
clamped to the image, so that a pixel on the last column counts twice there. The projected flow is the quotient of the
sums.

Backward, with n over the four pixels that source s adds to, c the summed weight and g the gradient at the output:

    dL/dF_s = - sum_n w_s / c_n * g_n            dL/dw_s = - sum_n <F_s + out_n, g_n> / c_n

Where a pixel lands is taken as constant. DAIN's own kernel has F_s - out_n in the second, which is not the derivative
(its output is stored negated) and makes the depth network's gradient 40 times too large: `original_gradient=True`
does the same, for comparing and for training exactly as published.

Sums are taken by `index_put_(accumulate=True)`, which adds in a fixed order on a CPU and a GPU alike.

Holes, pixels that nothing reached, are filled with the plain mean of the nearest pixels that are none to the left,
right, above and below, as far as there are any; a hole with none stays 0. Filled pixels pass no gradient.

Source: Bao et al., "Depth-Aware Video Frame Interpolation", 2019, equations 2 and 3; DAIN's DepthFlowProjection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpt.systems.dain.nn.operators.positions import landing, pixel_numbers


def corner_numbers(flow_b2hw: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pixel numbers (b, h, w, 4) that each pixel adds to, and whether it lands inside (b, h, w)."""
    height, width = flow_b2hw.shape[2:]
    x, y = landing(flow_b2hw)
    inside = (x >= 0) & (y >= 0) & (x <= width - 1) & (y <= height - 1)
    left = torch.where(inside, x, 0).floor().int()
    top = torch.where(inside, y, 0).floor().int()
    right, bottom = (left + 1).clamp(max=width - 1), (top + 1).clamp(max=height - 1)
    rows = torch.stack((top, top, bottom, bottom), dim=-1)
    columns = torch.stack((left, right, left, right), dim=-1)
    return pixel_numbers(rows, columns, height, width), inside


class Projection(torch.autograd.Function):
    """The operator without the filling of holes; returns the projected flow and the summed weights."""

    @staticmethod
    def forward(
        ctx: Any, flow: Tensor, weight: Tensor, original_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Return (b, 2, h, w) and (b, 1, h, w)."""
        batch, _, height, width = flow.shape
        index, inside = corner_numbers(flow)
        carried = torch.where(inside[:, None], torch.cat((-flow * weight, weight), dim=1), 0)
        rows = carried.permute(0, 2, 3, 1).reshape(-1, 1, 3).expand(-1, 4, -1).reshape(-1, 3)
        sums = rows.new_zeros(batch * height * width, 3)
        numbers = index.reshape(-1)
        if torch.onnx.is_in_onnx_export():  # its operator takes int64 alone
            numbers = numbers.long()
        sums.index_put_((numbers,), rows, accumulate=True)
        sums = sums.view(batch, height, width, 3).permute(0, 3, 1, 2)
        count = sums[:, 2:].contiguous()
        reached = count > 0
        out = torch.where(reached, sums[:, :2] / torch.where(reached, count, 1), 0)
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
        index, inside = corner_numbers(flow)
        reached = count > 0
        share = torch.where(reached, grad / torch.where(reached, count, 1), 0)
        # Per output pixel: g / c (2 channels) and <out, g> / c, summed over the four pixels that a source adds to.
        rows = (
            torch.cat((share, (share * out).sum(1, keepdim=True)), dim=1)
            .permute(0, 2, 3, 1)
            .reshape(-1, 3)
        )
        met = rows[index.reshape(-1)].view(batch, height, width, 4, 3).sum(3).permute(0, 3, 1, 2)
        met = torch.where(inside[:, None], met, 0)
        own, theirs = (flow * met[:, :2]).sum(1, keepdim=True), met[:, 2:]
        grad_weight = -(own - theirs) if ctx.original_gradient else -(own + theirs)
        return -weight * met[:, :2], grad_weight, None


def running_max(values: Tensor, dim: int) -> Tensor:
    """Return the largest value so far along `dim`: `cummax` in steps of doubled length, which ONNX can hold."""
    size, reach = values.shape[dim], 1
    while reach < size:
        later, earlier = (
            values.narrow(dim, reach, size - reach),
            values.narrow(dim, 0, size - reach),
        )
        values = torch.cat((values.narrow(dim, 0, reach), torch.maximum(later, earlier)), dim)
        reach *= 2
    return values


def nearest_reached(reached_b1hw: Tensor, dim: int, backwards: bool) -> tuple[Tensor, Tensor]:
    """Return the place along `dim` of the nearest reached pixel at or before (`backwards`: after) each one.

    Also whether there is one; if there is none the place is 0.
    """
    size = reached_b1hw.shape[dim]
    shape = [1, 1, 1, 1]
    shape[dim] = size
    places = torch.arange(size, device=reached_b1hw.device, dtype=torch.int32).view(shape)
    if backwards:
        found = -running_max(torch.where(reached_b1hw, -places, -size).flip(dim), dim).flip(dim)
        exists = found < size
    else:
        found = running_max(torch.where(reached_b1hw, places, -1), dim)
        exists = found >= 0
    return torch.where(exists, found, 0).long(), exists


def fill_holes(flow_b2hw: Tensor, count_b1hw: Tensor) -> Tensor:
    """Return the projected flow with its holes filled from the four directions."""
    reached = count_b1hw > 0
    total, found = torch.zeros_like(flow_b2hw), torch.zeros_like(count_b1hw)
    for dim, backwards in ((3, False), (3, True), (2, False), (2, True)):
        place, exists = nearest_reached(reached, dim, backwards)
        total = total + torch.where(exists, flow_b2hw.gather(dim, place.expand_as(flow_b2hw)), 0)
        found = found + exists
    return torch.where(reached, flow_b2hw, (total / found.clamp(min=1)).detach())


def project_flow(
    flow_b2hw: Tensor, weight_b1hw: Tensor, *, fill: bool = False, original_gradient: bool = False
) -> Tensor:
    """Return the projected flow (b, 2, h, w); `fill` fills the holes, which DAIN does outside training."""
    flow, count = Projection.apply(flow_b2hw, weight_b1hw, original_gradient)  # type: ignore[no-untyped-call]
    return fill_holes(flow, count) if fill else flow
