"""Variational autoencoders: an encoder to a mean and a log variance, a decoder to Bernoulli logits.

The conditional one sees the label on both sides; the denoising one sees a noisy image and answers for the clean one.
Source of the sizes: github.com/wiseodd/generative-models.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from mpt.config.options import ModelOptions
from mpt.nn.shared.generative_bodies import (
    ImageToVector,
    VectorToImage,
    check_image,
    class_count,
    join,
    one_hot,
)
from mpt.seams import DataSpec

TASK = "vae"
NAMES = {"vae": {}, "cvae": {"labels": "condition"}, "dvae": {"noise": 0.25}}
ABOUT = {
    "vae": "Variational autoencoder with Bernoulli outputs (Kingma and Welling, 2014).",
    "cvae": "Conditional variational autoencoder: encoder and decoder see the label.",
    "dvae": "Denoising variational autoencoder: sees a noisy image and answers for the clean one.",
}


class Settings(ModelOptions):
    image_size: int = Field(28, ge=1, le=1024)
    channels: int = Field(1, ge=1, le=4)
    body: Literal["mlp", "conv"] = "mlp"
    """Type of the networks: fully connected (mlp) or convolutional (conv)."""
    hidden: int = Field(128, ge=8)
    """Width of the hidden layer; for `conv`, of the features."""
    latent_size: int = Field(100, ge=1)
    """Length of the latent vector."""
    labels: Literal["ignore", "condition"] = "ignore"
    """Ignore the labels, or give them to encoder and decoder."""
    noise: float = Field(0.0, ge=0)
    """Standard deviation of the noise added to the encoder's input."""


class Encoder(nn.Module):
    """Map an image (b, c, h, w), and a label, to the mean and log variance (b, latent_size) of its posterior."""

    def __init__(self, settings: Settings, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.features = ImageToVector(
            settings.image_size,
            settings.channels,
            settings.hidden,
            settings.body,
            condition=classes,
        )
        self.mean = nn.Linear(settings.hidden, settings.latent_size)
        self.log_variance = nn.Linear(settings.hidden, settings.latent_size)

    def forward(self, image_bchw: Tensor, label_b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        features = self.features(image_bchw, _condition(label_b, self.classes))
        return self.mean(features), self.log_variance(features)


class Decoder(nn.Module):
    """Map a latent (b, d), and a label, to image logits (b, c, h, w)."""

    def __init__(self, settings: Settings, classes: int) -> None:
        super().__init__()
        self.classes, self.latent_size = classes, settings.latent_size
        self.decode = VectorToImage(
            settings.latent_size + classes,
            settings.image_size,
            settings.channels,
            settings.hidden,
            settings.body,
        )

    def forward(self, latent_bd: Tensor, label_b: Tensor | None = None) -> Tensor:
        logits: Tensor = self.decode(join(latent_bd, _condition(label_b, self.classes)))
        return logits


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Return "encoder" and "decoder"."""
    check_image(data, settings.image_size, settings.channels, "of the VAE family")
    classes = class_count(data, "cvae (model.labels)") if settings.labels == "condition" else 0
    return {"encoder": Encoder(settings, classes), "decoder": Decoder(settings, classes)}


def _condition(label_b: Tensor | None, classes: int) -> Tensor | None:
    if not classes:
        return None
    assert label_b is not None, "a conditional model was called without labels"
    return one_hot(label_b, classes)
