"""RIFE: intermediate flow estimated directly at the time between, coarse to fine, without depth or a cost volume.

`version` names a published network, whose files load (`mpt.systems.dain.nn.rife_published`). Without it this is a
network of the same structure with names of its own, made for short training:

Three blocks refine, at 1/4, 1/2 and full size, the flows from the frame between to both frames and the mask that fuses
the warped frames; each sees the frames warped by the known facts so far, and the time. A context network's features,
warped alike, feed a U-Net that adds a residual. At the published width (240, 150, 90) about ten million parameters.

Not in this implementation: the teacher of "privileged distillation", which only training uses (the loss here is the
task's). Not in the paper: `start: cost_volume`, for short training. The paper's blocks must learn from pictures alone
what matching is, which takes them millions of samples; there a small network with cost volumes, which the true flow can
teach, gives the first flows in place of the coarsest block, and the other two refine them.

Source: Huang et al., "Real-Time Intermediate Flow Estimation for Video Frame Interpolation", ECCV 2022,
figures 3 to 5 and its appendix; written from the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from mpt.config.options import ModelOptions
from mpt.errors import CheckpointError
from mpt.seams import DataSpec
from mpt.systems.dain.nn.networks.flow_net import UNITS_PER_PIXEL
from mpt.systems.dain.nn.networks.small_nets import SmallFlowNet
from mpt.systems.dain.nn.operators.interpolation import Between, Interpolator
from mpt.systems.dain.nn.operators.regions import (
    FlowScalingRegion,
    FusionRegion,
    IntermediateFlowRegion,
    WarpRegion,
)
from mpt.systems.dain.nn.operators.resizing import resized
from mpt.systems.dain.nn.rife_published.networks import PublishedRife
from mpt.systems.dain.nn.rife_published.version_settings import Version
from mpt.systems.dain.nn.rife_published.versions import (
    build_version,
    described,
    unwrapped,
    version_of,
)

TASK = "interpolate"
SCALES = (4, 2, 1)
RECTIFIER_SLOPE = 0.25
AMBIGUOUS = (4.1, 4.2)
"""Numbers in YAML that may be two versions."""
CONTRAST = 4.0
"""By which centred frames are multiplied for the blocks, so that they are about as large as flows and masks."""


class Settings(ModelOptions):
    """A published version; or widths of three flow blocks: `size: small` takes steps of 0.2 s on a CPU."""

    version: Version | None = None
    """A published network, in which `flownet.pkl` files load: the ECCV paper's (ifnet) and its variant for any time
    (ifnet_m), HD 3.x, or Practical-RIFE's from 4.0 on; null for this package's own, of `size` and `start`."""
    size: Literal["full", "small"] = "full"
    """full is the published width, small a narrow network for CPU runs."""
    start: Literal["block", "cost_volume"] = "block"
    """Where the first flows come from: the coarsest of three blocks as in the paper, or a small network with cost
    volumes, which `task.flow_steps` trains by the true flow and which learns in minutes."""
    image_size: int | None = Field(None, ge=16)
    """Side of the training pictures where the data set can choose it."""
    channels: Literal[3] = 3

    @field_validator("version", mode="before")
    @classmethod
    def read_number(cls, given: object) -> object:
        if not isinstance(given, float):
            return given
        if given in AMBIGUOUS:
            raise ValueError(
                f'write it in quotes ("{given}" or "{given}0"): without them 4.10 and 4.1 are one number'
            )
        return str(given)


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Return a 3 x 3 convolution and its parametric rectifier."""
    layer = nn.Conv2d(inputs, outputs, 3, stride, 1)
    # torch's default makes each layer's output 1.8 times smaller than its input, so that deep blocks begin as constants
    nn.init.kaiming_normal_(layer.weight, RECTIFIER_SLOPE)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return nn.Sequential(layer, nn.PReLU(outputs, RECTIFIER_SLOPE))


class FlowBlock(nn.Module):
    """Refine flows (4 channels) and mask logit (1) at one scale."""

    def __init__(self, inputs: int, width: int, depth: int) -> None:
        super().__init__()
        self.down = nn.Sequential(
            convolution(inputs, width // 2, 2), convolution(width // 2, width, 2)
        )
        self.body = nn.Sequential(*(convolution(width, width) for _ in range(depth)))
        self.last = nn.ConvTranspose2d(width, 5, 4, 2, 1)
        nn.init.zeros_(self.last.weight)
        assert self.last.bias is not None
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor, flow: Tensor | None, scale: int) -> tuple[Tensor, Tensor]:
        """Return the increments of flow (in pixels of full size) and mask, at full size."""
        if scale > 1:
            x = resized(x, 1 / scale)
        if flow is not None:
            x = torch.cat((x, shrunk(flow, scale).to(x.dtype)), dim=1)
        x = self.down(x)
        x = self.last(self.body(x) + x)
        x = resized(x, 2 * scale)
        return x[:, :4] * (2 * scale), x[:, 4:]


def shrunk(flow_b4hw: Tensor, scale: int) -> Tensor:
    """Return flows at 1/scale of the size, in its pixels."""
    if scale == 1:
        return flow_b4hw
    return resized(flow_b4hw, 1 / scale) / scale


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
    """Intermediate flow, fusion and refinement. The first of the widths is the coarsest block's."""

    multiple, margin = 32, 64

    def __init__(
        self, widths: tuple[int, int, int], depth: int, context: int, cost_volume: bool = False
    ) -> None:
        super().__init__()
        self.has_flow = cost_volume
        inputs = (18, 18) if cost_volume else (7, 18, 18)
        self.scales = SCALES[-len(inputs) :]
        if cost_volume:
            self.flownets = SmallFlowNet()
            self.flow_scaling = FlowScalingRegion(UNITS_PER_PIXEL, 4)
            self.first_flow = IntermediateFlowRegion()
        self.blocks = nn.ModuleList(
            FlowBlock(seen, width, depth)
            for seen, width in zip(inputs, widths[-len(inputs) :], strict=True)
        )
        self.context = ContextPyramid(context)
        self.refinement = Refinement(context)
        self.warp, self.fusion = WarpRegion(masked=False, border=True), FusionRegion()

    def flow_both_ways(self, first_bchw: Tensor, last_bchw: Tensor) -> Tensor:
        """Return the flows between the frames (b, 4, h, w), in pixels. Only if it starts from cost volumes."""
        flows = self.flownets(torch.cat((first_bchw, last_bchw), dim=1), both_ways=True)
        flows = self.flow_scaling(flows, flows.new_ones(len(flows)))
        return torch.cat((flows[: len(first_bchw)], flows[len(first_bchw) :]), dim=1)

    def prepare(self, first_bchw: Tensor, last_bchw: Tensor) -> Tensor | None:
        """Return the flows between the frames, or nothing if all depends on the time."""
        return self.flow_both_ways(first_bchw, last_bchw) if self.has_flow else None

    def render(
        self, first_bchw: Tensor, last_bchw: Tensor, prepared: Tensor | None, time_b: Tensor
    ) -> Between:
        """Return the refined frame; `flow` is from the frame between to both frames."""
        time = time_b[:, None, None, None].expand_as(first_bchw[:, :1])
        flow = mask = None
        warped_0, warped_1 = first_bchw, last_bchw
        pair = (first_bchw, last_bchw)
        if prepared is not None:
            flow, mask = self.first_flow(prepared, time_b)
            warped_0, warped_1 = self.both_warped(pair, flow)
            centre = (first_bchw + last_bchw).mean((2, 3), keepdim=True) / 2
        for block, scale in zip(self.blocks, self.scales, strict=True):
            known = [*pair, time]
            if flow is not None and mask is not None:
                known += [warped_0, warped_1, mask.to(first_bchw.dtype)]
            if prepared is not None:
                known = [
                    CONTRAST * (part - centre) if part.shape[1] == 3 else part for part in known
                ]
            more_flow, more_mask = block(torch.cat(known, dim=1), flow, scale)
            flow = more_flow if flow is None else flow + more_flow
            mask = more_mask if mask is None else mask + more_mask
            warped_0, warped_1 = self.both_warped(pair, flow)
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

    def both_warped(self, pair: tuple[Tensor, Tensor], flow_b4hw: Tensor) -> tuple[Tensor, Tensor]:
        """Return both frames read at the flows to them."""
        return self.warp(pair[0], flow_b4hw[:, :2]), self.warp(pair[1], flow_b4hw[:, 2:])


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Build `net`."""
    if settings.version is not None:
        return {"net": build_version(settings.version)}
    cost_volume = settings.start == "cost_volume"
    if settings.size == "full":
        return {"net": Rife((240, 150, 90), 8, 16, cost_volume)}
    return {"net": Rife((48, 32, 24), 3, 4, cost_volume)}


def translate_weights(
    networks: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """Return a published file's tensors for the network of its version; None for other files.

    Raises CheckpointError for a file of another version: of some, most shapes agree.
    """
    net = networks["net"]
    found = version_of(tensors) if isinstance(net, PublishedRife) else None
    if found is None:
        return None
    own = {name: value.shape for name, value in net.state_dict().items()}
    given = unwrapped(tensors)
    if {name: value.shape for name, value in given.items()} != own:
        raise CheckpointError(
            f"model.weights: the file holds RIFE's network {described(found)}; set model.version to {found}"
        )
    return {f"net.{name}": value for name, value in given.items()}
