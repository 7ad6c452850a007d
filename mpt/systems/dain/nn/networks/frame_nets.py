"""DAIN's three networks of its own: interpolation kernels, context features and the rectification of the blend.

Source: Bao et al., "MEMC-Net", 2019 (kernels, rectification) and "Depth-Aware Video Frame Interpolation", 2019.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mpt.nn.shared.hidden_channels import Hidden

KERNEL_TAPS = 16
CONTEXT_OWN = 3


class KernelTrunk(nn.Sequential):
    """An hourglass of 3 x 3 convolutions with additive skips; layers are numbered as in the published weights."""

    multiple = 32

    def __init__(self) -> None:
        first, *widths = 16, 32, 64, 128, 256, 512
        layers: list[nn.Module] = [nn.Conv2d(6, first, 3, padding=1), nn.ReLU()]
        before = first
        for width in widths:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            before = width
        for width in reversed(widths):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            layers += [nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)]
            before = width
        layers += [nn.Conv2d(before, first, 3, padding=1), nn.ReLU()]
        super().__init__(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features (b, 16, h, w); what stood before each pooling is added after the enlarging."""
        skips: list[Tensor] = []
        for layer in self:
            if isinstance(layer, nn.MaxPool2d):
                skips.append(x)
            x = layer(x)
            if isinstance(layer, nn.Upsample):
                x = x + skips.pop()
        return x


def kernel_head(width: int = 16) -> nn.Sequential:
    """Return the head that makes one frame's kernels, 16 channels for 4 x 4 taps."""
    return nn.Sequential(
        nn.Conv2d(width, KERNEL_TAPS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(KERNEL_TAPS, KERNEL_TAPS, 3, padding=1),
    )


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut; only the first is dilated."""

    def __init__(self, width: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.relu = nn.ReLU()

    def hidden_channels(self) -> Iterator[Hidden]:
        """Yield the channels between both convolutions, which pruning may remove."""
        yield Hidden(self.conv1, (), self.conv2)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(x + conv(relu(conv(x))))."""
        result: Tensor = self.relu(x + self.conv2(self.relu(self.conv1(x))))
        return result


class ContextNet(nn.Module):
    """Features of one frame at full size: the frame itself and three stages, joined."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv2d(3, width, 7, padding=3, bias=False), nn.ReLU())
        self.block2 = BasicBlock(width, dilation=4)
        self.block3 = BasicBlock(width, dilation=8)
        self.channels = CONTEXT_OWN + 3 * width

    def forward(self, image_b3hw: Tensor) -> Tensor:
        """Return (b, 3 + 3 width, h, w)."""
        one = self.block1(image_b3hw)
        two = self.block2(one)
        return torch.cat((image_b3hw.to(one.dtype), one, two, self.block3(two)), dim=1)


class RectifyNet(nn.Module):
    """What is to be added to the blended frame."""

    def __init__(self, inputs: int, width: int = 128, blocks: int = 3, side: int = 7) -> None:
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv2d(inputs, width, side, padding=side // 2), nn.ReLU())
        for number in range(2, 2 + blocks):
            self.add_module(f"block{number}", BasicBlock(width))
        self.add_module(f"block{2 + blocks}", nn.Sequential(nn.Conv2d(width, 3, 3, padding=1)))

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, 3, h, w)."""
        for stage in self.children():
            x = stage(x)
        return x


def initialise_xavier(*modules: nn.Module) -> None:
    """Give every convolution Xavier uniform weights and zero biases, as DAIN starts these three."""
    for module in modules:
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.xavier_uniform_(layer.weight)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
