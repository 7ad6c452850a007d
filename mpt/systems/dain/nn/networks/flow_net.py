"""PWC-Net: optical flow from coarse to fine over a feature pyramid, with warping and cost volumes at each level.

Level k works at 1/2^k of the input; its flow is refined from level k + 1's, enlarged by a transposed convolution. The
output is at 1/4, in units of 1/20 of an input pixel. Layer names are those of the published weights. `deconv2` is part
of them and used by nothing.

Source: Sun et al., "PWC-Net", 2018; the structure is that of DAIN's PWCDCNet. The pyramid of the small network ends
earlier and its decoders are narrower; level numbers keep their meaning.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpt.systems.dain.nn.operators.regions import CorrelationRegion, WarpRegion

SLOPE = 0.1
UNITS_PER_PIXEL = 20.0
FINEST = 2
"""The level whose flow is the output."""

PUBLISHED_PYRAMID = (16, 32, 64, 96, 128, 196)
PUBLISHED_DECODER = (128, 128, 96, 64, 32)
DILATIONS = (1, 2, 4, 8, 16, 1)
REFINEMENT = (128, 128, 128, 96, 64, 32)


def convolution(inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """Return a 3 x 3 convolution and its leaky rectifier."""
    layer = nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation)
    return nn.Sequential(layer, nn.LeakyReLU(SLOPE))


def doubling(inputs: int) -> nn.ConvTranspose2d:
    """Return a transposed convolution to 2 channels at twice the size."""
    return nn.ConvTranspose2d(inputs, 2, 4, 2, 1)


class FlowNet(nn.Module):
    """Flow from the first of two frames to the second. Heights and widths are multiples of `multiple`."""

    def __init__(
        self,
        pyramid: tuple[int, ...] = PUBLISHED_PYRAMID,
        decoder: tuple[int, ...] = PUBLISHED_DECODER,
    ) -> None:
        super().__init__()
        self.levels = len(pyramid)
        self.multiple = 2**self.levels
        self.decoder_depth = len(decoder)
        before = 3
        for level, width in enumerate(pyramid, start=1):
            # The published names of level 6 are in another order than those of the other levels.
            names = ("aa", "a", "b") if level == 6 else ("a", "aa", "b")
            for name, stride in zip(names, (2, 1, 1), strict=True):
                self.add_module(f"conv{level}{name}", convolution(before, width, stride))
                before = width
        self.correlation, self.warp = CorrelationRegion(), WarpRegion()
        self.activation = nn.LeakyReLU(SLOPE)
        for level in range(self.levels, FINEST - 1, -1):
            width = 81 if level == self.levels else 81 + pyramid[level - 1] + 4
            for number, more in enumerate(decoder):
                self.add_module(f"conv{level}_{number}", convolution(width, more))
                width += more
            self.add_module(f"predict_flow{level}", nn.Conv2d(width, 2, 3, 1, 1))
            self.add_module(f"deconv{level}", doubling(2))
            if level > FINEST:
                self.add_module(f"upfeat{level}", doubling(width))
        for number, (more, dilation) in enumerate(
            zip(self.refinement(decoder), DILATIONS, strict=True), start=1
        ):
            self.add_module(f"dc_conv{number}", convolution(width, more, dilation=dilation))
            width = more
        self.dc_conv7 = nn.Conv2d(width, 2, 3, 1, 1)
        self.reset_parameters()

    @staticmethod
    def refinement(decoder: tuple[int, ...]) -> tuple[int, ...]:
        """Return the widths of the dilated refinement, in proportion to the decoder's."""
        return tuple(width * decoder[0] // PUBLISHED_DECODER[0] for width in REFINEMENT)

    def reset_parameters(self) -> None:
        """Initialise as PWC-Net does: Kaiming normal weights and zero biases."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def layer(self, name: str) -> nn.Module:
        """Return a layer by its published name."""
        return self.get_submodule(name)

    def features(self, image_b3hw: Tensor) -> list[Tensor]:
        """Return the pyramid, from 1/2 down."""
        maps: list[Tensor] = []
        x = image_b3hw
        for level in range(1, self.levels + 1):
            for name in ("aa", "a", "b") if level == 6 else ("a", "aa", "b"):
                x = self.layer(f"conv{level}{name}")(x)
            maps.append(x)
        return maps

    def decode(self, level: int, x: Tensor) -> Tensor:
        """Return the dense features of one level: each layer sees all before it, the newest first."""
        for number in range(self.decoder_depth):
            x = torch.cat((self.layer(f"conv{level}_{number}")(x), x), dim=1)
        return x

    def pyramids(self, frames_b6hw: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the features of both frames, from 1/2 down."""
        batch = len(frames_b6hw)
        maps = self.features(torch.cat((frames_b6hw[:, :3], frames_b6hw[:, 3:])))
        return [(x[:batch], x[batch:]) for x in maps]

    def decode_levels(self, maps: list[tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
        """Return the flow of every level from the first frame's pyramid to the second's."""
        flows: dict[int, Tensor] = {}
        x = up_flow = up_features = None
        for level in range(self.levels, FINEST - 1, -1):
            first, second = maps[level - 1]
            if up_flow is None or up_features is None:
                x = self.activation(self.correlation(first, second))
            else:
                # A level's flow is in 1/20 of an input pixel; its own pixels are 2^level of those.
                second = self.warp(second, up_flow * (UNITS_PER_PIXEL / 2**level))
                cost = self.activation(self.correlation(first, second))
                x = torch.cat((cost, first, up_flow, up_features), dim=1)
            x = self.decode(level, x)
            flows[level] = self.layer(f"predict_flow{level}")(x)
            if level > FINEST:
                up_flow = self.layer(f"deconv{level}")(flows[level])
                up_features = self.layer(f"upfeat{level}")(x)
        assert x is not None
        for number in range(1, len(REFINEMENT) + 1):
            x = self.layer(f"dc_conv{number}")(x)
        flows[FINEST] = flows[FINEST] + self.dc_conv7(x)
        return flows

    def forward(self, frames_b6hw: Tensor, both_ways: bool = False) -> Tensor:
        """Return the flow (b, 2, h/4, w/4) from the first three channels' frame to the others'.

        `both_ways` returns (2b, 2, h/4, w/4), that flow and the one back; each frame's pyramid is computed once.
        """
        maps = self.pyramids(frames_b6hw)
        forth = self.decode_levels(maps)[FINEST]
        if not both_ways:
            return forth
        return torch.cat((forth, self.decode_levels([(other, one) for one, other in maps])[FINEST]))


def pad_amount(size: int, multiple: int) -> int:
    """Return how many pixels a side lacks to the next multiple."""
    return -size % multiple
