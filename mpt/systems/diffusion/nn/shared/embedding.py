"""Noise levels on their way into a network.

Levels travel as whole numbers of `TICKS` per unit. Every precision mode casts the floating inputs of a network, and in
bfloat16 neighbouring numbers near 1000 are 4 apart; integers pass as they are, and the network reads them in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

TICKS = 2**20
LONGEST_PERIOD = 10000.0


def to_ticks(time_b: Tensor) -> Tensor:
    """Return levels as whole numbers; the product with a power of two is exact in float32."""
    return (time_b * TICKS).round().long() if time_b.is_floating_point() else time_b * TICKS


def from_ticks(ticks_b: Tensor) -> Tensor:
    """Return levels in float32."""
    return ticks_b.float() / TICKS


def waves(time_b: Tensor, features: int) -> Tensor:
    """Return sines and cosines (b, features) of levels in float32, with periods from 2 pi to 20,000 pi.

    Source: Vaswani et al. 2017, section 3.5.
    """
    half = features // 2
    rates = torch.exp(-math.log(LONGEST_PERIOD) * torch.arange(half, device=time_b.device) / half)
    angle = time_b.float()[:, None] * rates
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class TimeEmbedding(nn.Module):
    """Map levels in ticks (b,) to features (b, width)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.first, self.second = nn.Linear(inputs, width), nn.Linear(width, width)

    def forward(self, ticks_b: Tensor) -> Tensor:
        features = waves(from_ticks(ticks_b), self.inputs).to(self.first.weight.dtype)
        embedded: Tensor = self.second(functional.silu(self.first(features)))
        return embedded
