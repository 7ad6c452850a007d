"""DAIN: depth-aware video frame interpolation from five networks, 24,031,656 parameters at its published size.

Flow in both directions, log depth of both frames, and interpolation kernels are estimated; the flows are projected to
the time between, near surfaces first; both frames and their context features are warped; the blend is rectified. State
names and shapes are those of baowenbo/DAIN, so that its `best.pth` loads; `size: small` has the same five parts under
the same prefixes, narrower.

If published training lets a gradient differ from the derivative (see `projection` and `filter_interpolation`),
`original_gradients` does too. Holes in projected flows are filled in evaluation and not in training, as published.

Source: Bao et al., "Depth-Aware Video Frame Interpolation", CVPR 2019, and its code (MIT).
"""

from __future__ import annotations

import importlib.util
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from mpt.config.options import ModelOptions
from mpt.errors import ConfigError
from mpt.seams import DataSpec
from mpt.systems.dain.nn.networks.depth_net import DepthNet
from mpt.systems.dain.nn.networks.flow_net import UNITS_PER_PIXEL, FlowNet
from mpt.systems.dain.nn.networks.frame_nets import (
    ContextNet,
    KernelTrunk,
    RectifyNet,
    initialise_xavier,
    kernel_head,
)
from mpt.systems.dain.nn.networks.small_nets import (
    SmallDepthNet,
    SmallFlowNet,
    SmallKernelTrunk,
    start_small,
)
from mpt.systems.dain.nn.operators.interpolation import Between, Interpolator
from mpt.systems.dain.nn.operators.regions import (
    BlendRegion,
    FilterInterpolationRegion,
    FlowScalingRegion,
    OperatorRegion,
    ProjectionRegion,
)

TASK = "interpolate"
PARTS = {
    "flow": ("flownets",),
    "depth": ("depthNet",),
    "context": ("ctxNet",),
    "kernel": ("initScaleNets_filter", "initScaleNets_filter1", "initScaleNets_filter2"),
    "rectify": ("rectifyNet",),
}
"""The five parts by the prefixes of their state names."""


class Settings(ModelOptions):
    """Its size, and whether gradients are the derivative or the published ones."""

    size: Literal["full", "small", "tiny"] = "full"
    """full is the published network, small one of the same structure for CPU runs; tiny is half as wide
    but for its flow and rectification, which is 3 x 3 and one block deeper instead of 7 x 7."""
    image_size: int | None = Field(None, ge=16)
    """Side of the training pictures where the data set can choose it."""
    original_gradients: bool = False
    """Use DAIN's own gradients at the depth and at copied pixels, which are not the derivative."""
    kernels: Literal["torch", "triton"] = "torch"
    """What computes its operators on a GPU: torch, or Triton kernels, which hold less. On a CPU it is always torch."""


class Prepared(NamedTuple):
    """What DAIN knows of two frames before it knows the time; `0` and `1` are the first and the last frame."""

    flow_01: Tensor
    flow_10: Tensor
    log_depth_0: Tensor
    log_depth_1: Tensor
    kernel_0: Tensor
    kernel_1: Tensor
    context_0: Tensor
    context_1: Tensor


class Dain(Interpolator):
    """The five networks and the way between them."""

    margin = 64
    has_flow = True

    def __init__(
        self,
        size: str = "full",
        original_gradients: bool = False,
        kernels: Literal["torch", "triton"] = "torch",
    ) -> None:
        super().__init__()
        self.initScaleNets_filter: nn.Module
        if size == "full":
            self.initScaleNets_filter = KernelTrunk()
            self.initScaleNets_filter1, self.initScaleNets_filter2 = kernel_head(), kernel_head()
            self.ctxNet = ContextNet()
            self.rectifyNet = RectifyNet(rectify_inputs(self.ctxNet.channels))
            initialise_xavier(*(m for m in self.children()))
            self.flownets: nn.Module = FlowNet()
            self.depthNet: nn.Module = DepthNet()
            self.multiple, factor = 64, 4
        else:
            width, side, blocks = (16, 7, 1) if size == "small" else (8, 3, 2)
            self.initScaleNets_filter = SmallKernelTrunk(width)
            self.initScaleNets_filter1, self.initScaleNets_filter2 = (
                kernel_head(width),
                kernel_head(width),
            )
            self.ctxNet = ContextNet(width=width // 2)
            inputs = rectify_inputs(self.ctxNet.channels)
            self.rectifyNet = RectifyNet(inputs, width=32, blocks=blocks, side=side)
            self.flownets = SmallFlowNet()
            self.depthNet = SmallDepthNet(width // 2)
            self.multiple, factor = 8, 4
            start_small((self.initScaleNets_filter1, self.initScaleNets_filter2), self.rectifyNet)
        self.flow_scaling = FlowScalingRegion(UNITS_PER_PIXEL, factor)
        self.projection = ProjectionRegion(original_gradients)
        self.filter_interpolation = FilterInterpolationRegion(original_gradients)
        self.blend = BlendRegion()
        for module in self.modules():
            if isinstance(module, OperatorRegion):
                module.kernels = kernels
        self.fill_holes: bool | None = None
        """None fills them in evaluation alone, as published."""

    def prepare(self, first_bchw: Tensor, last_bchw: Tensor) -> Prepared:
        """Return flows at 1/4, log depths, kernels and context features of both frames."""
        batch = len(first_bchw)
        both = torch.cat((first_bchw, last_bchw))
        kernel = self.initScaleNets_filter(torch.cat((first_bchw, last_bchw), dim=1))
        flows = self.flow_01_and_10(first_bchw, last_bchw)
        log_depth = self.depthNet(both)  # as one batch: BatchNorm's statistics are over both frames
        context = self.ctxNet(both)
        context = torch.cat((context, log_depth.detach().to(context.dtype)), dim=1)
        return Prepared(
            *flows,
            log_depth[:batch],
            log_depth[batch:],
            self.initScaleNets_filter1(kernel),
            self.initScaleNets_filter2(kernel),
            context[:batch],
            context[batch:],
        )

    def depth_of(self, image_bchw: Tensor) -> Tensor:
        """Return a frame's log depth (b, 1, h, w)."""
        depth: Tensor = self.depthNet(image_bchw)
        return depth

    def flow_01_and_10(self, first_bchw: Tensor, last_bchw: Tensor) -> tuple[Tensor, Tensor]:
        """Return the flow network's output for both directions."""
        flows: Tensor = self.flownets(torch.cat((first_bchw, last_bchw), dim=1), both_ways=True)
        return flows[: len(first_bchw)], flows[len(first_bchw) :]

    def flow_both_ways(self, first_bchw: Tensor, last_bchw: Tensor) -> Tensor:
        """Return the flows between the frames (b, 4, h, w), in pixels."""
        whole = first_bchw.new_ones(len(first_bchw))
        flows = self.flow_01_and_10(first_bchw, last_bchw)
        return torch.cat([self.flow_scaling(flow, whole) for flow in flows], dim=1)

    def render(
        self, first_bchw: Tensor, last_bchw: Tensor, prepared: Prepared, time_b: Tensor
    ) -> Between:
        """Return the rectified frame, the blend, and the projected flows."""
        p = prepared
        fill = not self.training if self.fill_holes is None else self.fill_holes
        flow_01, flow_10 = (
            self.flow_scaling(p.flow_01, time_b),
            self.flow_scaling(p.flow_10, 1 - time_b),
        )
        projected_01 = self.projection(flow_01, p.log_depth_0, fill)
        projected_10 = self.projection(flow_10, p.log_depth_1, fill)
        warped_0, context_0 = self.filter_interpolation(
            (first_bchw, p.context_0), projected_01, p.kernel_0
        )
        warped_1, context_1 = self.filter_interpolation(
            (last_bchw, p.context_1), projected_10, p.kernel_1
        )
        blended = self.blend(warped_0, warped_1, time_b)
        seen = (
            blended,
            warped_0,
            warped_1,
            projected_01,
            projected_10,
            p.kernel_0,
            p.kernel_1,
            context_0,
            context_1,
        )
        # In the context's dtype: 437 channels at full size are the largest tensor, and float32 parts would make it so.
        joined = torch.cat([part.to(context_0.dtype) for part in seen], dim=1)
        image = blended + self.rectifyNet(joined).to(blended.dtype)
        extra = {
            "projected_01": projected_01,
            "projected_10": projected_10,
            "warped_0": warped_0,
            "warped_1": warped_1,
            "context_0": context_0,
            "context_1": context_1,
            "flow_01": flow_01,
            "flow_10": flow_10,
        }
        return Between(image, blended, flow_01, extra)


def rectify_inputs(context_channels: int) -> int:
    """Return the rectifying network's inputs: blend, two warped frames, two flows, two kernels, two contexts."""
    return 3 + 6 + 4 + 32 + 2 * (context_channels + 1)


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Build `net`."""
    if settings.kernels == "triton" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "model.kernels: triton is not installed; it comes with torch's CUDA wheels. Use kernels: torch"
        )
    return {"net": Dain(settings.size, settings.original_gradients, settings.kernels)}
