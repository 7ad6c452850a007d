"""The Charbonnier penalty, a smooth absolute value; and what a flow is pretrained by.

Source: Charbonnier et al., 1994; Bao et al., "Depth-Aware Video Frame Interpolation", 2019, equation 11 (epsilon 1e-6).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpt.systems.dain.nn.operators.warping import bilinear_taps, warp

SMOOTHNESS_EDGE = 10.0


def charbonnier(difference: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Return the mean over all elements of sqrt(d^2 + epsilon^2). A mean over samples of equal size."""
    return (difference.square() + epsilon * epsilon).sqrt().mean()


def end_point_error(flow_b4hw: Tensor, true_b4hw: Tensor, epsilon: float = 1e-2) -> Tensor:
    """Return the mean length of the error of two flows that are joined along channels, in pixels."""
    squared = (flow_b4hw - true_b4hw).square()
    lengths = torch.stack((squared[:, :2].sum(1), squared[:, 2:].sum(1)))
    return (lengths + epsilon * epsilon).sqrt().mean()


def photometric(
    flow_b4hw: Tensor, first_bchw: Tensor, last_bchw: Tensor, smoothness: float = 0.1
) -> Tensor:
    """Return how unlike the frames are after warping by the flows, and how rough the flows are away from edges.

    For pretraining without true flow. Source: Jonschkowski et al., "What Matters in Unsupervised Optical Flow", 2020,
    in its plainest form (Charbonnier, first-order edge-aware smoothness, what leaves the frame masked).
    """
    total = flow_b4hw.new_zeros(())
    for flow, here, there in (
        (flow_b4hw[:, :2], first_bchw, last_bchw),
        (flow_b4hw[:, 2:], last_bchw, first_bchw),
    ):
        inside = bilinear_taps(flow)[1].sum(-1)[:, None].detach() > 0.999
        difference = torch.where(inside, warp(there, flow, masked=False) - here, 0)
        total = total + charbonnier(difference, 1e-3)
        for axis in (-1, -2):
            edge = torch.exp(-SMOOTHNESS_EDGE * here.diff(dim=axis).abs().mean(1, keepdim=True))
            total = total + smoothness * (edge * charbonnier_each(flow.diff(dim=axis))).mean()
    return total / 2


def charbonnier_each(value: Tensor, epsilon: float = 1e-3) -> Tensor:
    """Return sqrt(v^2 + epsilon^2)."""
    return (value.square() + epsilon * epsilon).sqrt()
