"""The attention blocks of YOLO11 and YOLO26 (C2PSA) and YOLO12 (A2C2f), with the published parameter names.

Sources: Khanam and Hussain, "YOLOv11: an overview of the key architectural enhancements", 2024; Tian, Ye and Doermann,
"YOLOv12: attention-centric real-time object detectors", 2025, section 3. Tested against the published programs'
outputs. Shape suffixes: b batch, c channels, h height, w width, n places, d channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpt.systems.yolofuse.nn.layers.yolo_blocks import Bottleneck, C2f, C3k, Conv

HEAD_CHANNELS = 32


class PositionAttention(nn.Module):
    """Self-attention over all places; keys have half the channels of values; positions from a depthwise 3x3."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.values = heads, channels // heads
        self.keys = self.values // 2
        self.qkv = Conv(channels, channels + 2 * self.keys * heads, act=False)
        self.proj = Conv(channels, channels, act=False)
        self.pe = Conv(channels, channels, 3, groups=channels, act=False)

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the attended map."""
        batch, channels, height, width = x_bchw.shape
        qkv = self.qkv(x_bchw).view(batch, self.heads, 2 * self.keys + self.values, height * width)
        q_bhdn, k_bhdn, v_bhdn = qkv.split((self.keys, self.keys, self.values), 2)
        weights = ((q_bhdn.transpose(2, 3) @ k_bhdn) * self.keys**-0.5).softmax(-1)
        mixed = (v_bhdn @ weights.transpose(2, 3)).reshape(batch, channels, height, width)
        y: Tensor = self.proj(mixed + self.pe(v_bhdn.reshape(batch, channels, height, width)))
        return y


class PositionBlock(nn.Module):
    """Attention and a two-layer perceptron, each with a skip."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.attn = PositionAttention(channels, heads)
        self.ffn = nn.Sequential(
            Conv(channels, 2 * channels), Conv(2 * channels, channels, act=False)
        )

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the block's output."""
        x_bchw = x_bchw + self.attn(x_bchw)
        y: Tensor = x_bchw + self.ffn(x_bchw)
        return y


class C2PSA(nn.Module):
    """Split in two halves, attention on the second."""

    def __init__(self, channels: int, repeats: int = 1) -> None:
        super().__init__()
        self.width = channels // 2
        self.cv1, self.cv2 = Conv(channels, 2 * self.width), Conv(2 * self.width, channels)
        self.m = nn.Sequential(
            *(PositionBlock(self.width, max(1, self.width // 64)) for _ in range(repeats))
        )

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the block's output."""
        kept, mixed = self.cv1(x_bchw).split((self.width, self.width), 1)
        y: Tensor = self.cv2(torch.cat((kept, self.m(mixed)), 1))
        return y


class C3k2Attention(C2f):
    """C2f whose chain is of bottlenecks of half width, each followed by attention (YOLO26's last block)."""

    def __init__(self, inputs: int, outputs: int, repeats: int = 1) -> None:
        super().__init__(inputs, outputs, repeats, shortcut=True)

    def link(self, shortcut: bool) -> nn.Module:
        """Return one block of the chain."""
        attention = PositionBlock(self.width, max(1, self.width // 64))
        return nn.Sequential(Bottleneck(self.width, self.width, shortcut, 0.5), attention)


class AreaAttention(nn.Module):
    """Self-attention within each of `areas` equal strips of rows; q and k are the halves of one convolution."""

    def __init__(self, channels: int, heads: int, areas: int) -> None:
        super().__init__()
        self.heads, self.areas, self.depth = heads, areas, channels // heads
        self.qk = Conv(channels, 2 * channels, act=False)
        self.v = Conv(channels, channels, act=False)
        self.proj = Conv(channels, channels, act=False)
        self.pe = Conv(channels, channels, 5, groups=channels, act=False)

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the attended map. The number of places must be divisible by the areas."""
        batch, channels, height, width = x_bchw.shape
        strips = batch * self.areas
        v_bchw = self.v(x_bchw)

        def by_head(map_bchw: Tensor) -> Tensor:
            places = map_bchw.flatten(2).transpose(1, 2).reshape(strips, -1, self.heads, self.depth)
            return places.transpose(1, 2)

        q_bhnd, k_bhnd = (by_head(half) for half in self.qk(x_bchw).chunk(2, 1))
        weights = ((q_bhnd @ k_bhnd.transpose(2, 3)) * self.depth**-0.5).softmax(-1)
        mixed = (weights @ by_head(v_bchw)).transpose(1, 2).reshape(batch, height * width, channels)
        y: Tensor = self.proj(
            mixed.transpose(1, 2).reshape(batch, channels, height, width) + self.pe(v_bchw)
        )
        return y


class AreaBlock(nn.Module):
    """Area attention and a two-layer perceptron, each with a skip."""

    def __init__(self, channels: int, areas: int, expansion: float) -> None:
        super().__init__()
        hidden = int(channels * expansion)
        self.attn = AreaAttention(channels, channels // HEAD_CHANNELS, areas)
        self.mlp = nn.Sequential(Conv(channels, hidden), Conv(hidden, channels, act=False))

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the block's output."""
        x_bchw = x_bchw + self.attn(x_bchw)
        y: Tensor = x_bchw + self.mlp(x_bchw)
        return y


class A2C2f(nn.Module):
    """A chain whose links are all concatenated: pairs of area-attention blocks, or C3k blocks if `areas` is 0.

    `residual` (sizes l and x) adds the input with a learnt gain per channel, which starts at .01.
    """

    def __init__(
        self, inputs: int, outputs: int, repeats: int, areas: int, residual: bool = False
    ) -> None:
        super().__init__()
        hidden = outputs // 2
        self.cv1, self.cv2 = Conv(inputs, hidden), Conv((1 + repeats) * hidden, outputs)
        expansion = 1.2 if residual else 2.0
        self.gamma = nn.Parameter(torch.full((outputs,), 0.01)) if residual and areas else None
        self.m = nn.ModuleList(
            nn.Sequential(*(AreaBlock(hidden, areas, expansion) for _ in range(2)))
            if areas
            else C3k(hidden, hidden)
            for _ in range(repeats)
        )

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the block's output."""
        parts = [self.cv1(x_bchw)]
        for block in self.m:
            parts.append(block(parts[-1]))
        y: Tensor = self.cv2(torch.cat(parts, 1))
        return y if self.gamma is None else x_bchw + self.gamma.view(1, -1, 1, 1) * y
