"""A small denoising network for small pictures: residual convolutions, with a linear map over all places in each block.

The level of noise and the class scale and shift the features between a block's two convolutions. The last layer begins
at zero, so that training begins with the answer 0. For pictures up to 32 pixels: the map over places has their number
squared as weights.

Sources of the pieces: Ho et al. 2020, appendix B (residual blocks); Dhariwal & Nichol 2021, section 3 (scale and
shift); Tolstikhin et al. 2021 (the map over places).
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from mpt.config.options import ModelOptions
from mpt.errors import ConfigError
from mpt.nn.shared.generative_bodies import check_image, class_count
from mpt.seams import DataSpec
from mpt.systems.diffusion.nn.shared.denoiser import Denoiser
from mpt.systems.diffusion.nn.shared.embedding import TimeEmbedding

TASK = "diffusion"
GROUPS = 8


class Settings(ModelOptions):
    image_size: int = Field(8, ge=4, le=32)
    channels: int = Field(1, ge=1, le=4)
    features: int = Field(48, ge=8)
    """Channels of the hidden layers, a multiple of 8."""
    blocks: int = Field(4, ge=1)
    """Residual blocks, one after the other."""
    embedding: int = Field(128, ge=8)
    """Length of the vector of noise level and class."""
    labels: Literal["condition", "ignore"] = "condition"
    """Give the network the class of a picture, or not."""


class Block(nn.Module):
    """Add two convolutions and a map over places to features (b, c, h, w)."""

    def __init__(self, features: int, embedding: int, places: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = (
            nn.GroupNorm(GROUPS, features),
            nn.GroupNorm(GROUPS, features),
        )
        self.first = nn.Conv2d(features, features, 3, padding=1)
        self.second = nn.Conv2d(features, features, 3, padding=1)
        self.modulation = nn.Linear(embedding, 2 * features)
        self.mix = nn.Linear(places, places)

    def forward(self, x_bchw: Tensor, embedding_be: Tensor) -> Tensor:
        scale, shift = self.modulation(functional.silu(embedding_be))[:, :, None, None].chunk(
            2, dim=1
        )
        y = self.first(functional.silu(self.first_norm(x_bchw)))
        y = self.second_norm(y) * (1 + scale) + shift
        x_bchw = x_bchw + self.second(functional.silu(y))
        mixed: Tensor = x_bchw + self.mix(x_bchw.flatten(2)).view_as(x_bchw)
        return mixed


class SmallDenoiser(Denoiser):
    """Map noisy pictures (b, c, h, w), levels in ticks (b,) and classes (b,) to answers (b, c, h, w).

    The class with the number `classes` is that of pictures whose class is left out.
    """

    def __init__(self, settings: Settings, classes: int) -> None:
        super().__init__()
        width = settings.features
        self.classes, self.conditions = classes, ("label",) if classes else ()
        self.time = TimeEmbedding(2 * (settings.embedding // 8), settings.embedding)
        self.label = nn.Embedding(classes + 1, settings.embedding) if classes else None
        self.input = nn.Conv2d(settings.channels, width, 3, padding=1)
        self.position = nn.Parameter(
            torch.zeros(1, width, settings.image_size, settings.image_size)
        )
        places = settings.image_size**2
        self.blocks = nn.ModuleList(
            Block(width, settings.embedding, places) for _ in range(settings.blocks)
        )
        self.output = nn.Conv2d(width, settings.channels, 3, padding=1)
        for parameter in self.output.parameters():
            nn.init.zeros_(parameter)

    def forward(self, noisy_bchw: Tensor, ticks_b: Tensor, *conditions: Tensor) -> Tensor:
        embedding = self.time(ticks_b)
        if self.label is not None:
            (label,) = conditions
            embedding = embedding + self.label(label)
        x = self.input(noisy_bchw) + self.position
        for block in self.blocks:
            x = block(x, embedding)
        answer: Tensor = self.output(x)
        return answer


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Return `net`."""
    check_image(data, settings.image_size, settings.channels, "small_denoiser")
    if settings.features % GROUPS:
        raise ConfigError(
            f"model.features: {settings.features} is not a multiple of {GROUPS}, the groups of its norms"
        )
    classes = (
        class_count(data, "small_denoiser (model.labels)") if settings.labels == "condition" else 0
    )
    return {"net": SmallDenoiser(settings, classes)}
