"""The convolutional blocks of YOLOv8, 11, 12 and 26, with the parameter names of the published networks.

Written from the published listings of names and shapes and from the papers' figures; the outputs are tested against the
published programs (tests/systems/yolofuse). BatchNorm has epsilon 1e-3 and momentum 0.03 throughout.

Shape suffixes: b batch, c channels, h height, w width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

EPSILON, MOMENTUM = 1e-3, 0.03


class Conv(nn.Module):
    """Convolution without bias, BatchNorm, SiLU (or nothing). After `fuse`, `bn` is the identity."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
        act: bool = True,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False
        )
        self.bn: nn.Module = nn.BatchNorm2d(outputs, EPSILON, MOMENTUM)
        self.act: nn.Module = nn.SiLU(inplace=False) if act else nn.Identity()

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Convolve, normalise, activate."""
        result: Tensor = self.act(self.bn(self.conv(x_bchw)))
        return result


class Bottleneck(nn.Module):
    """Two 3x3 convolutions, `ratio` of the outputs between them, and a skip if the shapes allow one."""

    def __init__(
        self, inputs: int, outputs: int, shortcut: bool = True, ratio: float = 1.0
    ) -> None:
        super().__init__()
        hidden = int(outputs * ratio)
        self.cv1, self.cv2 = Conv(inputs, hidden, 3), Conv(hidden, outputs, 3)
        self.adds = shortcut and inputs == outputs

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the block's output."""
        y: Tensor = self.cv2(self.cv1(x_bchw))
        return x_bchw + y if self.adds else y


class C2f(nn.Module):
    """Split in two halves, a chain of blocks on the second, every link of the chain concatenated (YOLOv8)."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        repeats: int = 1,
        shortcut: bool = False,
        ratio: float = 0.5,
    ) -> None:
        super().__init__()
        self.width = int(outputs * ratio)
        self.cv1 = Conv(inputs, 2 * self.width)
        self.cv2 = Conv((2 + repeats) * self.width, outputs)
        self.m = nn.ModuleList(self.link(shortcut) for _ in range(repeats))

    def link(self, shortcut: bool) -> nn.Module:
        """Return one block of the chain."""
        return Bottleneck(self.width, self.width, shortcut)

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the block's output."""
        parts = list(self.cv1(x_bchw).chunk(2, 1))
        for block in self.m:
            parts.append(block(parts[-1]))
        y: Tensor = self.cv2(torch.cat(parts, 1))
        return y


class C3k(nn.Module):
    """Two 1x1 branches, a chain of two bottlenecks on one, merged by a third 1x1."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        hidden = outputs // 2
        self.cv1, self.cv2, self.cv3 = (
            Conv(inputs, hidden),
            Conv(inputs, hidden),
            Conv(2 * hidden, outputs),
        )
        self.m = nn.Sequential(*(Bottleneck(hidden, hidden) for _ in range(2)))

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the block's output."""
        y: Tensor = self.cv3(torch.cat((self.m(self.cv1(x_bchw)), self.cv2(x_bchw)), 1))
        return y


class C3k2(C2f):
    """C2f whose chain is of half-width bottlenecks, or of C3k blocks if `deep` (YOLO11)."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        repeats: int = 1,
        deep: bool = False,
        ratio: float = 0.5,
    ) -> None:
        self.deep = deep
        super().__init__(inputs, outputs, repeats, True, ratio)

    def link(self, shortcut: bool) -> nn.Module:
        """Return one block of the chain."""
        if self.deep:
            return C3k(self.width, self.width)
        return Bottleneck(self.width, self.width, shortcut, 0.5)


class SPPF(nn.Module):
    """Three 5x5 max pools in a chain, all four maps concatenated.

    YOLO26's form has no activation behind its first convolution and adds its input, if it has as many channels.
    """

    def __init__(self, inputs: int, outputs: int, adds: bool = False) -> None:
        super().__init__()
        self.cv1, self.cv2 = Conv(inputs, inputs // 2, act=not adds), Conv(inputs // 2 * 4, outputs)
        self.m = nn.MaxPool2d(5, 1, 2)
        self.adds = adds and inputs == outputs

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the block's output."""
        parts = [self.cv1(x_bchw)]
        for _ in range(3):
            parts.append(self.m(parts[-1]))
        y: Tensor = self.cv2(torch.cat(parts, 1))
        return x_bchw + y if self.adds else y


class Concat(nn.Module):
    """Concatenate several maps along the channels."""

    def forward(self, *maps_bchw: Tensor) -> Tensor:
        """Return the maps, one after the other."""
        return torch.cat(maps_bchw, 1)


class Camera(nn.Module):
    """Take one camera's picture in three channels; a grey one is repeated."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, cameras_bchw: Sequence[Tensor]) -> Tensor:
        """Return the camera's picture."""
        picture = cameras_bchw[self.number]
        return picture.expand(-1, 3, -1, -1) if picture.shape[1] == 1 else picture


class Stack(nn.Module):
    """Put the channels of all cameras behind each other."""

    def forward(self, cameras_bchw: Sequence[Tensor]) -> Tensor:
        """Return (b, all channels, h, w)."""
        return torch.cat(tuple(cameras_bchw), 1)
