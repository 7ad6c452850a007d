"""A small convolutional classifier for CPU runs: three stages of conv-BatchNorm-ReLU, pooled, one linear layer.

Widths double while resolution halves, as in every VGG-like network; about 100 k parameters at the default width.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn

from mpt.config.options import ModelOptions
from mpt.errors import ConfigError
from mpt.seams import DataSpec

TASK = "classify"
SMALLEST = 8


class Settings(ModelOptions):
    """Width of the first stage and dropout before the last layer."""

    image_size: int = Field(16, ge=SMALLEST)
    features: int = Field(32, ge=1)
    """Channels of the first stage; each stage doubles them."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability before the last layer."""


class SmallCnn(nn.Module):
    """Images (b, c, h, w) to logits (b, classes)."""

    def __init__(self, channels: int, classes: int, features: int, dropout: float) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        width = channels
        for stage in range(3):
            wider = features * 2**stage
            stages.append(
                nn.Sequential(
                    nn.Conv2d(width, wider, 3, padding=1, bias=False),
                    nn.BatchNorm2d(wider),
                    nn.ReLU(inplace=True),
                    nn.MaxPool2d(2),
                )
            )
            width = wider
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(width, classes)
        )

    def forward(self, image_bchw: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.stages(image_bchw))
        return logits


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Build `net` for the data's channels and classes. Raises ConfigError for images that cannot be halved thrice."""
    channels, *sides = data.require("image", "model small_cnn").shape
    if min(sides) < SMALLEST:
        raise ConfigError(
            f"model small_cnn: its stages halve images three times, and the data set delivers {sides[0]}x{sides[1]}; "
            f"set dataset.image_size to {SMALLEST} or more, or leave it out so that it follows the model"
        )
    return {"net": SmallCnn(channels, len(data.classes), settings.features, settings.dropout)}
