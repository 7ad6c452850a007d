"""What RIFE's published networks share: blocks refine flow and mask, coarse to fine; the warped frames are blended.

`eccv` holds the paper's network (`IFNet`) and its variant for any time (`IFNet_m`), `hd` the HD networks 3.x,
`practical` those from 4.0 on. State names and shapes are those of the files.

Source: Huang et al., "Real-Time Intermediate Flow Estimation for Video Frame Interpolation", ECCV 2022; the programs
named in `blocks`. Written from a description of their networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpt.systems.dain.nn.operators.interpolation import Interpolator
from mpt.systems.dain.nn.operators.regions import FusionRegion, WarpRegion
from mpt.systems.dain.nn.rife_published.blocks import Refined

Frames = tuple[Tensor, Tensor]


@dataclass
class Estimate:
    """Flow, mask before the sigmoid and warped frames after a block, and the features for the next one."""

    flow: Tensor
    mask: Tensor
    warped: Frames
    features: Tensor | None = None


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts along channels, in the dtype of the first, which is a frame."""
    return torch.cat([part.to(parts[0].dtype) for part in parts], dim=1)


def time_plane(time_b: Tensor, like_bchw: Tensor) -> Tensor:
    """Return the time as a channel of its own (b, 1, h, w)."""
    return time_b.to(like_bchw.dtype)[:, None, None, None].expand_as(like_bchw[:, :1])


def swapped_flow(flow_b4hw: Tensor) -> Tensor:
    """Return the flows of both frames exchanged."""
    return torch.cat((flow_b4hw[:, 2:], flow_b4hw[:, :2]), dim=1)


class PublishedRife(Interpolator):
    """What all versions share: padding with zeros, `scale`, warping and the blend."""

    pads_with_zeros = True
    margin = 64
    least_multiple = 32

    def __init__(self, scales: Sequence[float]) -> None:
        super().__init__()
        self.published_scales = tuple(scales)
        self.warp, self.fusion = WarpRegion(masked=False, border=True), FusionRegion()
        self.use_scale(1.0)

    def use_scale(self, scale: float) -> None:
        """Let the blocks work at sizes times `scale`, for frames much larger than the network was trained on.

        0.5 finds motion twice as large in half the detail. Sides given to the network are multiples of `multiple`
        afterwards.
        """
        self.scales = tuple(published / scale for published in self.published_scales)
        self.multiple = max(self.least_multiple, round(self.least_multiple / scale))

    def both_warped(self, pair: Frames, flow_b4hw: Tensor) -> Frames:
        """Return two images read at the flows to them."""
        return self.warp(pair[0], flow_b4hw[:, :2]), self.warp(pair[1], flow_b4hw[:, 2:4])

    def after(self, pair: Frames, flow: Tensor, made: Refined) -> Estimate:
        """Return the estimate with a new flow and the mask and features that a block made."""
        return Estimate(flow, made.mask_b1hw, self.both_warped(pair, flow), made.features_bchw)

    def blend(self, estimate: Estimate) -> Tensor:
        """Return the mean of the warped frames by the mask."""
        blended: Tensor = self.fusion(*estimate.warped, estimate.mask)
        return blended

    def prepare(self, first_bchw: Tensor, last_bchw: Tensor) -> Any:
        """Return nothing: all depends on the time."""
        return None
