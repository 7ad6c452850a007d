"""A small classifier with one of everything that modes, tricks and optimizers treat in ways of their own."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from mpt.config.options import ModelOptions
from mpt.seams import DataSpec

TASK = "classify"


class Settings(ModelOptions):
    image_size: int = Field(16, ge=4)
    features: int = Field(4, ge=2)


class Block(nn.Module):
    """A residual block with a 1x1 and a 3x3 convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(width, width, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.wide = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the input and what the block adds."""
        return x_bchw + self.wide(functional.silu(self.norm(self.narrow(x_bchw))))


class WallNet(nn.Module):
    """Convolutions, BatchNorm, LayerNorm, matrices, a weight of two layers and a number without dimensions."""

    def __init__(self, channels: int, classes: int, features: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, features, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Block(features), Block(features), Block(features))
        self.norm = nn.LayerNorm(2 * features)
        self.first = nn.Linear(2 * features, 2 * features)
        self.second = nn.Linear(2 * features, 2 * features)
        self.second.weight = self.first.weight
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Sequential(
            nn.Linear(2 * features, 2 * features), nn.SiLU(), nn.Linear(2 * features, classes)
        )

    def forward(self, image_bchw: Tensor) -> Tensor:
        """Return logits (b, classes)."""
        x_bchw = self.blocks(self.stem(image_bchw))
        x_bf = self.norm(torch.cat([x_bchw.mean((2, 3)), x_bchw.amax((2, 3))], 1))
        x_bf = x_bf + self.second(functional.silu(self.first(x_bf))) * self.gain
        logits: Tensor = self.head(x_bf)
        return logits


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Build `net` for the data's channels and classes."""
    return {"net": WallNet(data.fields["image"].shape[0], len(data.classes), settings.features)}
