"""The parts of DAIN that compute in float32 under every precision mode.

Coordinates are the reason: in float16 neighbouring numbers are half a pixel apart between 512 and 1024, and a whole
pixel beyond, in bfloat16 four and eight. A flow is small and may be half; the position it is added to may not. So
positions, the sums of the projection, the exponential of depth and the scaling of flows are regions of their own: each
is a module that casts its floating inputs up and runs with autocast and O1 switched off. Weights converted to half (O2,
O3) do not reach them, for they have none.

Pixels that are moved keep their own dtype: a feature map in half is gathered in half, by weights whose positions were
found in float32. `FLOAT32_REGIONS` lists the classes; a test asserts their dtype inside under every mode.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpt.precision.shared.float32_modules import cast_floating, full_precision
from mpt.systems.dain.nn.operators.correlation import correlate
from mpt.systems.dain.nn.operators.filter_interpolation import gather_filtered, tap_positions
from mpt.systems.dain.nn.operators.positions import gather_weighted
from mpt.systems.dain.nn.operators.projection import project_flow
from mpt.systems.dain.nn.operators.resizing import resized
from mpt.systems.dain.nn.operators.warping import INSIDE, bilinear_taps, sample_at_border

LEAST_SHARE = 0.01
"""What a frame counts at the least where the other one sees a pixel better."""


def raised(value: Tensor) -> Tensor:
    """Return half tensors as float32, others as they are (float64 stays)."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


class OperatorRegion(nn.Module):
    """A region around an operator of which there is a Triton version too."""

    kernels: Literal["torch", "triton"] = "torch"

    def stand_in(self, like: Tensor) -> Any:
        """Return the module of Triton versions where they are asked for and can run, else None.

        They run on a GPU, and on a CPU in Triton's interpreter. A pass on fake tensors is planned with torch's.
        """
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if (
            self.kernels != "triton"
            or isinstance(like, FakeTensor)
            or not (like.is_cuda or interpreted)
        ):
            return None
        return importlib.import_module("mpt.systems.dain.nn.operators.triton_operators")


class CorrelationRegion(OperatorRegion):
    """A cost volume, whose means are taken in float32; the result returns in the features' dtype."""

    def forward(self, first_bchw: Tensor, second_bchw: Tensor) -> Tensor:
        """Return (b, 81, h, w)."""
        with full_precision(first_bchw.device.type):
            triton = self.stand_in(first_bchw)
            if triton is not None:
                volume: Tensor = triton.correlate(raised(first_bchw), raised(second_bchw))
                return volume.to(first_bchw.dtype)
            return correlate(raised(first_bchw), raised(second_bchw)).to(first_bchw.dtype)


class WarpRegion(nn.Module):
    """Bilinear warping with float32 positions; features keep their dtype.

    With `border` and without gradients `grid_sample` does it: it is faster and has an operator in ONNX. With gradients
    it is the weighted gather, whose backward pass adds up in a fixed order.
    """

    def __init__(self, masked: bool = True, border: bool = False) -> None:
        super().__init__()
        self.masked, self.border = masked, border

    def forward(self, x_bchw: Tensor, flow_b2hw: Tensor) -> Tensor:
        """Return x read at each pixel plus the flow; outside it is 0, or with `border` the nearest pixel."""
        with full_precision(x_bchw.device.type):
            if self.border and not torch.is_grad_enabled():
                return sample_at_border(raised(x_bchw), raised(flow_b2hw)).to(x_bchw.dtype)
            index, weight = bilinear_taps(raised(flow_b2hw), border=self.border)
            if self.masked:
                weight = weight * (weight.detach().sum(-1, keepdim=True) >= INSIDE)
            return gather_weighted(x_bchw, index, weight.to(x_bchw.dtype))


class FlowScalingRegion(nn.Module):
    """From the flow network's output at 1/4 to pixels at full size: times 20 t, then bilinear upsampling."""

    def __init__(self, scale: float, factor: int) -> None:
        super().__init__()
        self.scale, self.factor = scale, factor

    def forward(self, flow_b2hw: Tensor, time_b: Tensor) -> Tensor:
        """Return the flow to a time between (b, 2, h, w), float32."""
        with full_precision(flow_b2hw.device.type):
            scaled = self.scale * raised(time_b)[:, None, None, None] * raised(flow_b2hw)
            return resized(scaled, self.factor)


class ProjectionRegion(OperatorRegion):
    """Inverse depth and the projection weighted by it."""

    def __init__(self, original_gradient: bool = False) -> None:
        super().__init__()
        self.original_gradient = original_gradient

    def forward(self, flow_b2hw: Tensor, log_depth_b1hw: Tensor, fill: bool) -> Tensor:
        """Return the projected flow, float32."""
        with full_precision(flow_b2hw.device.type):
            weight = 1e-6 + 1.0 / torch.exp(raised(log_depth_b1hw))
            triton = self.stand_in(flow_b2hw)
            project = project_flow if triton is None else triton.project_flow
            projected: Tensor = project(
                raised(flow_b2hw), weight, fill=fill, original_gradient=self.original_gradient
            )
            return projected


class FilterInterpolationRegion(OperatorRegion):
    """Adaptive warping of several images by one flow and kernel, with float32 positions; images keep their dtype."""

    def __init__(self, original_gradient: bool = False) -> None:
        super().__init__()
        self.original_gradient = original_gradient

    def forward(
        self, images: tuple[Tensor, ...], flow_b2hw: Tensor, kernel_bkhw: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the moved images; the second and later pass no gradient to flow and kernel, as DAIN's context."""
        with full_precision(flow_b2hw.device.type):
            flow, kernel = raised(flow_b2hw), raised(kernel_bkhw)
            triton = self.stand_in(flow)
            taps = tap_positions(flow) if triton is None else None
            moved: list[Tensor] = []
            for image in images:
                if taps is None:
                    result = triton.interpolate_filtered(
                        image, flow, kernel, original_gradient=self.original_gradient
                    )
                else:
                    result = gather_filtered(
                        image, taps, kernel, original_gradient=self.original_gradient
                    )
                moved.append(result)
                flow, kernel = flow.detach(), kernel.detach()
                taps = taps and (taps[0], taps[1].detach(), taps[2])
            return tuple(moved)


class BlendRegion(nn.Module):
    """The mean of both warped frames, weighted by time."""

    def forward(self, first_bchw: Tensor, last_bchw: Tensor, time_b: Tensor) -> Tensor:
        """Return (1 - t) first + t last, float32."""
        with full_precision(first_bchw.device.type):
            first, last, time = cast_floating(
                [first_bchw, last_bchw, time_b[:, None, None, None]], torch.float32
            )
            blended: Tensor = (1 - time) * first + time * last
            return blended


class BackwardBlendRegion(nn.Module):
    """Both frames read against the flow to a time between, weighted by time and by whether they were inside."""

    def forward(
        self, first_bchw: Tensor, last_bchw: Tensor, flows_b4hw: Tensor, time_b: Tensor
    ) -> Tensor:
        """Return the blend, float32; `flows` are first to last and last to first."""
        with full_precision(first_bchw.device.type):
            first, last, flows, time = cast_floating(
                [first_bchw, last_bchw, flows_b4hw, time_b[:, None, None, None]], torch.float32
            )
            # The flow at the time between is taken to be that of the same pixel in either frame, the nearer one more.
            motion = (1 - time) * flows[:, :2] - time * flows[:, 2:]
            total = weights = torch.zeros_like(first[:, :1])
            for image, flow, share in (
                (first, -time * motion, 1 - time),
                (last, (1 - time) * motion, time),
            ):
                index, bilinear = bilinear_taps(flow)
                share = share * (bilinear.sum(-1)[:, None] + 1e-6)
                total = total + share * gather_weighted(
                    image, index, bilinear / (bilinear.sum(-1, keepdim=True) + 1e-6)
                )
                weights = weights + share
            return total / weights


class IntermediateFlowRegion(nn.Module):
    """From the flows between two frames to those from a time between, and the mask that fuses what they warp."""

    def forward(self, flows_b4hw: Tensor, time_b: Tensor) -> tuple[Tensor, Tensor]:
        """Return flows to the first and to the last frame (b, 4, h, w) and the mask's logit (b, 1, h, w), float32.

        As in `BackwardBlendRegion` motion is that of the same pixel in either frame, and what leaves a frame counts
        little there.
        """
        with full_precision(flows_b4hw.device.type):
            flows, time = cast_floating([flows_b4hw, time_b[:, None, None, None]], torch.float32)
            motion = (1 - time) * flows[:, :2] - time * flows[:, 2:]
            to_first, to_last = -time * motion, (1 - time) * motion
            inside = [
                bilinear_taps(flow.detach())[1].sum(-1)[:, None] + LEAST_SHARE
                for flow in (to_first, to_last)
            ]
            share_0, share_1 = (1 - time) + LEAST_SHARE, time + LEAST_SHARE
            logit = torch.log(share_0 * inside[0]) - torch.log(share_1 * inside[1])
            return torch.cat((to_first, to_last), dim=1), logit


class FusionRegion(nn.Module):
    """Two warped frames fused by a mask given as its logit."""

    def forward(self, warped_0: Tensor, warped_1: Tensor, mask_logit_b1hw: Tensor) -> Tensor:
        """Return the fused frame, float32."""
        with full_precision(warped_0.device.type):
            mask = torch.sigmoid(raised(mask_logit_b1hw))
            return mask * raised(warped_0) + (1 - mask) * raised(warped_1)


FLOAT32_REGIONS = (
    CorrelationRegion,
    WarpRegion,
    FlowScalingRegion,
    ProjectionRegion,
    FilterInterpolationRegion,
    BlendRegion,
    BackwardBlendRegion,
    IntermediateFlowRegion,
    FusionRegion,
)
