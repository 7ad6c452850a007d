"""DCGAN: a convolutional generator and discriminator (Radford, Metz, Chintala 2016, arXiv:1511.06434).

Strided convolutions instead of pooling, BatchNorm everywhere but at the image, ReLU in the generator and LeakyReLU 0.2
in the discriminator, weights from N(0, 0.02). Any power of two from 16 pixels up; the paper's network is 64 with 128
features. The discriminator returns logits: half precision cannot carry a sigmoid followed by BCE.

Shapes: b batch, c channels, h height, w width, z latent.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from mpt.config.options import ModelOptions
from mpt.nn.shared.generative_bodies import check_image
from mpt.seams import DataSpec

TASK = "gan"


class Settings(ModelOptions):
    """Sizes of both networks; `features` is the width next to the image."""

    image_size: Literal[16, 32, 64, 128] = 32
    latent_size: int = Field(100, ge=1)
    """Length of the latent vector."""
    features: int = Field(64, ge=1)
    """Channels of the layer next to the image; deeper layers have multiples of it."""


class Generator(nn.Module):
    """Latents (b, z) to images (b, c, h, w) in [-1, 1]."""

    def __init__(self, image_size: int, channels: int, latent_size: int, features: int) -> None:
        super().__init__()
        self.latent_size = latent_size
        doublings = int(math.log2(image_size)) - 3
        width = features * 2**doublings
        layers: list[nn.Module] = [
            nn.Sequential(
                nn.ConvTranspose2d(latent_size, width, 4, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            )
        ]
        for _ in range(doublings):
            layers.append(
                nn.Sequential(
                    nn.ConvTranspose2d(width, width // 2, 4, 2, 1, bias=False),
                    nn.BatchNorm2d(width // 2),
                    nn.ReLU(inplace=True),
                )
            )
            width //= 2
        layers.append(nn.Sequential(nn.ConvTranspose2d(width, channels, 4, 2, 1), nn.Tanh()))
        self.layers = nn.Sequential(*layers)
        self.apply(initialize)

    def forward(self, latent_bz: Tensor) -> Tensor:
        """Return images for latents."""
        image_bchw: Tensor = self.layers(latent_bz[:, :, None, None])
        return image_bchw


class Discriminator(nn.Module):
    """Images (b, c, h, w) in [-1, 1] to logits (b,)."""

    def __init__(self, image_size: int, channels: int, features: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(channels, features, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True))
        ]
        width = features
        for _ in range(int(math.log2(image_size)) - 3):
            layers.append(
                nn.Sequential(
                    nn.Conv2d(width, width * 2, 4, 2, 1, bias=False),
                    nn.BatchNorm2d(width * 2),
                    nn.LeakyReLU(0.2, inplace=True),
                )
            )
            width *= 2
        layers.append(nn.Conv2d(width, 1, 4))
        self.layers = nn.Sequential(*layers)
        self.apply(initialize)

    def forward(self, image_bchw: Tensor) -> Tensor:
        """Return one logit per image."""
        logit_b: Tensor = self.layers(image_bchw).flatten()
        return logit_b


def initialize(module: nn.Module) -> None:
    """Draw weights as the paper does: N(0, 0.02), BatchNorm's scale N(1, 0.02)."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Build `gen` and `disc` for images of the data's channel count."""
    channels = data.require("image", "model dcgan").shape[0]
    check_image(data, settings.image_size, channels, "dcgan")
    return {
        "gen": Generator(settings.image_size, channels, settings.latent_size, settings.features),
        "disc": Discriminator(settings.image_size, channels, settings.features),
    }
