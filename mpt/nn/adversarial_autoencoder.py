"""Autoencoders trained against a discriminator: of codes (AAE), or of pairs of image and code (BiGAN, ALI).

The AAE's discriminator separates encodings from draws of the prior, and a reconstruction loss ties encoder to decoder.
BiGAN has no reconstruction: its discriminator sees (image, code of the image) against (generated image, its latent).
Source of the sizes: github.com/wiseodd/generative-models. Papers: Makhzani et al. 2016; Donahue et al. 2017.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from mpt.config.options import ModelOptions
from mpt.nn.shared.generative_bodies import ImageToVector, VectorToImage, check_image
from mpt.seams import DataSpec

TASK = "gan"
NAMES = {"aae": {"judges": "code"}, "bigan": {"judges": "pair"}}
ABOUT = {
    "aae": "Adversarial autoencoder: a discriminator of codes (Makhzani et al., 2015).",
    "bigan": "BiGAN (ALI): a discriminator of pairs of image and code (Donahue et al., 2017).",
}


class Settings(ModelOptions):
    image_size: int = Field(28, ge=1, le=1024)
    channels: int = Field(1, ge=1, le=4)
    body: Literal["mlp", "conv"] = "mlp"
    """Type of the networks: fully connected (mlp) or convolutional (conv)."""
    hidden: int = Field(128, ge=8)
    """Width of the hidden layer; for `conv`, of the features."""
    latent_size: int = Field(5, ge=1)
    """Length of the latent vector."""
    judges: Literal["code", "pair"] = "code"
    """The discriminator's input: the code alone, or image and code together."""


class Encoder(nn.Module):
    """Map an image (b, c, h, w) to a code (b, latent_size)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.features = ImageToVector(
            settings.image_size, settings.channels, settings.hidden, settings.body
        )
        self.code = nn.Linear(settings.hidden, settings.latent_size)

    def forward(self, image_bchw: Tensor) -> Tensor:
        code: Tensor = self.code(self.features(image_bchw))
        return code


class Decoder(nn.Module):
    """Map a code (b, latent_size) to image logits (b, c, h, w), or with `as_image` to the image in [0, 1]."""

    image_range = (0.0, 1.0)
    prior = "normal"

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.latent_size = settings.latent_size
        self.decode = VectorToImage(
            settings.latent_size,
            settings.image_size,
            settings.channels,
            settings.hidden,
            settings.body,
        )

    def forward(self, code_bd: Tensor, as_image: bool = True) -> Tensor:
        logits: Tensor = self.decode(code_bd)
        return logits.sigmoid() if as_image else logits


class CodeDiscriminator(nn.Module):
    """Judge a code (b, latent_size) by one logit."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(settings.latent_size, settings.hidden), nn.ReLU())
        self.score = nn.Linear(settings.hidden, 1)

    def forward(self, code_bd: Tensor) -> Tensor:
        score: Tensor = self.score(self.layers(code_bd))
        return score.flatten()


class PairDiscriminator(nn.Module):
    """Judge an image and a code together by one logit."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.features = ImageToVector(
            settings.image_size,
            settings.channels,
            settings.hidden,
            settings.body,
            condition=settings.latent_size,
        )
        self.score = nn.Linear(settings.hidden, 1)

    def forward(self, image_bchw: Tensor, code_bd: Tensor) -> Tensor:
        score: Tensor = self.score(self.features(image_bchw, code_bd))
        return score.flatten()


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Return "encoder", "gen" (the decoder) and "disc"."""
    check_image(data, settings.image_size, settings.channels, "aae or bigan")
    discriminator = CodeDiscriminator if settings.judges == "code" else PairDiscriminator
    return {"encoder": Encoder(settings), "gen": Decoder(settings), "disc": discriminator(settings)}
