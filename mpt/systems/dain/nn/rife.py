"""RIFE: intermediate flow estimated directly at the time between, coarse to fine, without depth or a cost volume.

Three blocks refine, at 1/4, 1/2 and full size, the flows from the frame between to both frames and the mask that fuses
the warped frames; each sees the frames warped by what is known so far, and the time. A context network's features,
warped alike, feed a U-Net that adds a residual. At the published width (240, 150, 90) about ten million parameters.

Not in this implementation: the teacher of "privileged distillation", which only training uses (the loss here is the
task's). Source: Huang et al., "Real-Time Intermediate Flow Estimation for Video Frame Interpolation", ECCV 2022,
figures 3 to 5 and its appendix; written from the paper.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from mpt.config.options import ModelOptions
from mpt.seams import DataSpec
from mpt.systems.dain.nn.interpolation import Between, Interpolator
from mpt.systems.dain.nn.regions import FusionRegion, WarpRegion

TASK = "interpolate"
SCALES = (4, 2, 1)


class Settings(ModelOptions):
    """Widths of the three flow blocks and of the context features; `size: small` takes steps of .2 s on a CPU."""

    size: Literal["full", "small"] = "full"
    """full is the published width, small a narrow network for CPU runs."""
    image_size: int | None = Field(None, ge=16)
    """Side of the training pictures where the data set can choose it."""
    channels: Literal[3] = 3


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Return a 3 x 3 convolution and its parametric rectifier."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.PReLU(outputs))


class FlowBlock(nn.Module):
    """Refine flows (4 channels) and mask logit (1) at one scale."""

    def __init__(self, inputs: int, width: int, depth: int) -> None:
        super().__init__()
        self.down = nn.Sequential(convolution(inputs, width // 2, 2), convolution(width // 2, width, 2))
        self.body = nn.Sequential(*(convolution(width, width) for _ in range(depth)))
        self.last = nn.ConvTranspose2d(width, 5, 4, 2, 1)
        nn.init.zeros_(self.last.weight)
        assert self.last.bias is not None
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor, flow: Tensor | None, scale: int) -> tuple[Tensor, Tensor]:
        """Return what is to be added to flow (in pixels of full size) and mask, at full size."""
        if scale > 1:
            x = F.interpolate(x, scale_factor=1 / scale, mode="bilinear", align_corners=False)
        if flow is not None:
            x = torch.cat((x, shrunk(flow, scale).to(x.dtype)), dim=1)
        x = self.down(x)
        x = self.last(self.body(x) + x)
        x = F.interpolate(x, scale_factor=2 * scale, mode="bilinear", align_corners=False)
        return x[:, :4] * (2 * scale), x[:, 4:]


def shrunk(flow_b4hw: Tensor, scale: int) -> Tensor:
    """Return flows at 1/scale of the size, in its pixels."""
    if scale == 1:
        return flow_b4hw
    return F.interpolate(flow_b4hw, scale_factor=1 / scale, mode="bilinear", align_corners=False) / scale


class ContextPyramid(nn.Module):
    """Features of one frame at 1/2, 1/4, 1/8 and 1/16, warped by the flow at each size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (3, width, 2 * width, 4 * width, 8 * width)
        self.stages = nn.ModuleList(
            nn.Sequential(convolution(before, after, 2), convolution(after, after))
            for before, after in pairwise(widths)
        )
        self.warp = WarpRegion(masked=False)

    def forward(self, x: Tensor, flow_b2hw: Tensor) -> list[Tensor]:
        """Return the warped features."""
        found = []
        for level, stage in enumerate(self.stages, start=1):
            x = stage(x)
            found.append(self.warp(x, shrunk(flow_b2hw, 2**level)))
        return found


class Refinement(nn.Module):
    """A U-Net over everything known, whose output is added to the fused frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        c = width
        self.down = nn.ModuleList(
            nn.Sequential(convolution(before, after, 2), convolution(after, after))
            for before, after in ((17, 2 * c), (4 * c, 4 * c), (8 * c, 8 * c), (16 * c, 16 * c))
        )
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(before, after, 4, 2, 1), nn.PReLU(after))
            for before, after in ((32 * c, 8 * c), (16 * c, 4 * c), (8 * c, 2 * c), (4 * c, c))
        )
        self.last = nn.Conv2d(c, 3, 3, 1, 1)
        nn.init.zeros_(self.last.weight)
        assert self.last.bias is not None
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor, context_0: list[Tensor], context_1: list[Tensor]) -> Tensor:
        """Return the residual, between -1 and 1."""
        skips = []
        for number, stage in enumerate(self.down):
            x = stage(x)
            skips.append(x)
            x = torch.cat((x, context_0[number], context_1[number]), dim=1)
        for number, stage in enumerate(self.up):
            x = stage(x if number == 0 else torch.cat((x, skips[3 - number]), dim=1))
        return torch.tanh(self.last(x))


class Rife(Interpolator):
    """Intermediate flow, fusion and refinement."""

    multiple, margin, has_flow = 32, 64, False

    def __init__(self, widths: tuple[int, int, int], depth: int, context: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            FlowBlock(inputs, width, depth) for inputs, width in zip((7, 18, 18), widths, strict=True)
        )
        self.context = ContextPyramid(context)
        self.refinement = Refinement(context)
        self.warp, self.fusion = WarpRegion(masked=False), FusionRegion()

    def prepare(self, first_bchw: Tensor, last_bchw: Tensor) -> None:
        """Return nothing: all depends on the time."""

    def render(self, first_bchw: Tensor, last_bchw: Tensor, prepared: None, time_b: Tensor) -> Between:
        """Return the refined frame; `flow` is from the frame between to both frames."""
        time = time_b[:, None, None, None].expand_as(first_bchw[:, :1])
        flow = mask = None
        warped_0, warped_1 = first_bchw, last_bchw
        for block, scale in zip(self.blocks, SCALES, strict=True):
            known = [first_bchw, last_bchw, time]
            if flow is not None and mask is not None:
                known += [warped_0, warped_1, mask.to(first_bchw.dtype)]
            more_flow, more_mask = block(torch.cat(known, dim=1), flow, scale)
            flow = more_flow if flow is None else flow + more_flow
            mask = more_mask if mask is None else mask + more_mask
            warped_0, warped_1 = self.warp(first_bchw, flow[:, :2]), self.warp(last_bchw, flow[:, 2:])
        assert flow is not None
        assert mask is not None
        fused = self.fusion(warped_0, warped_1, mask)
        seen = [first_bchw, last_bchw, warped_0, warped_1, mask, flow]
        residual = self.refinement(
            torch.cat([part.to(first_bchw.dtype) for part in seen], dim=1),
            self.context(first_bchw, flow[:, :2]),
            self.context(last_bchw, flow[:, 2:]),
        )
        return Between(fused + residual.to(fused.dtype), fused, flow)


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Build `net`."""
    if settings.size == "full":
        return {"net": Rife((240, 150, 90), 8, 16)}
    return {"net": Rife((48, 32, 24), 3, 4)}
