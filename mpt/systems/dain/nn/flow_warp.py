"""The simplest learnt interpolation: DAIN's small flow network, warping by that flow, and a mean. A baseline.

No depth, kernels, context or rectification. The motion at a pixel of the frame between is the time-weighted mean of
what both flows say at that pixel; both frames are read against it, and where one's target lies outside, the other
counts alone. Source: the idea of Liu et al., "Deep Voxel Flow", 2017.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from mpt.config.options import ModelOptions
from mpt.seams import DataSpec
from mpt.systems.dain.nn.networks.flow_net import UNITS_PER_PIXEL
from mpt.systems.dain.nn.networks.small_nets import SmallFlowNet
from mpt.systems.dain.nn.operators.interpolation import Between, Interpolator
from mpt.systems.dain.nn.operators.regions import BackwardBlendRegion, FlowScalingRegion

TASK = "interpolate"


class Settings(ModelOptions):
    """Widths of the flow network's three levels."""

    pyramid: list[int] = Field([16, 32, 48], min_length=3, max_length=3)
    """Channels of the three levels of the flow network's feature pyramid."""
    image_size: int | None = Field(None, ge=16)
    """Side of the training pictures where the data set can choose it."""
    channels: Literal[3] = 3


class FlowWarp(Interpolator):
    """One flow network and no more."""

    multiple, margin, has_flow = 8, 32, True

    def __init__(self, pyramid: list[int]) -> None:
        super().__init__()
        self.flownets = SmallFlowNet((pyramid[0], pyramid[1], pyramid[2]))
        self.flow_scaling = FlowScalingRegion(UNITS_PER_PIXEL, 4)
        self.blend = BackwardBlendRegion()

    def flow_both_ways(self, first_bchw: Tensor, last_bchw: Tensor) -> Tensor:
        """Return the flows between the frames (b, 4, h, w), in pixels."""
        flows = self.flownets(torch.cat((first_bchw, last_bchw), dim=1), both_ways=True)
        flows = self.flow_scaling(flows, flows.new_ones(len(flows)))
        return torch.cat((flows[: len(first_bchw)], flows[len(first_bchw) :]), dim=1)

    def prepare(self, first_bchw: Tensor, last_bchw: Tensor) -> Tensor:
        """Return both flows."""
        return self.flow_both_ways(first_bchw, last_bchw)

    def render(
        self, first_bchw: Tensor, last_bchw: Tensor, prepared: Tensor, time_b: Tensor
    ) -> Between:
        """Return the blend of both frames, each warped by the flow that leaves the other."""
        image = self.blend(first_bchw, last_bchw, prepared, time_b)
        return Between(image, flow=prepared[:, :2])


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Build `net`."""
    return {"net": FlowWarp(settings.pyramid)}
