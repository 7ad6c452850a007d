"""The two halves that the small generative models are assembled from: vector to image logits, image to vector.

The default is one hidden layer, as in the collection these models come from; `body="conv"` exchanges it for a few
convolutions without changing inputs and outputs. There is no batch normalisation: a gradient penalty needs each
sample's score to depend on that sample alone, and a step split into micro-batches must equal the whole one.

Shapes: b batch, d vector, c channels, h and w image. Source of the sizes: github.com/wiseodd/generative-models.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from mpt.errors import ConfigError, DataError
from mpt.seams import DataSpec

Body = Literal["mlp", "conv"]
Activation = Literal["relu", "leaky_relu", "prelu"]

LARGEST_IMAGE = 1024
_SMALLEST_MAP, _LARGEST_MAP = 4, 7


class VectorToImage(nn.Module):
    """Map (b, inputs) to image logits (b, c, h, w)."""

    def __init__(
        self,
        inputs: int,
        image_size: int,
        channels: int,
        hidden: int,
        body: Body,
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        self.shape = (channels, image_size, image_size)
        if body == "mlp":
            self.layers = nn.Sequential(
                nn.Linear(inputs, hidden),
                make_activation(activation),
                nn.Linear(hidden, channels * image_size**2),
            )
            return
        start, doublings = conv_plan(image_size)
        layers: list[nn.Module] = [
            nn.Linear(inputs, hidden * start**2),
            make_activation(activation),
            nn.Unflatten(1, (hidden, start, start)),
        ]
        width = hidden
        for _ in range(doublings):
            narrower = max(width // 2, 8)
            layers += [nn.Upsample(scale_factor=2), nn.Conv2d(width, narrower, 3, padding=1)]
            layers.append(make_activation(activation))
            width = narrower
        layers.append(nn.Conv2d(width, channels, 3, padding=1))
        self.layers = nn.Sequential(*layers)

    def forward(self, vector_bd: Tensor) -> Tensor:
        logits: Tensor = self.layers(vector_bd)
        return logits.reshape(-1, *self.shape)


class ImageToVector(nn.Module):
    """Map an image (b, c, h, w), and a condition (b, d) if one is set, to activated features (b, hidden)."""

    def __init__(
        self,
        image_size: int,
        channels: int,
        hidden: int,
        body: Body,
        activation: Activation = "relu",
        condition: int = 0,
    ) -> None:
        super().__init__()
        if body == "mlp":
            self.image: nn.Module = nn.Flatten()
            pixels = channels * image_size**2
            self.joined = nn.Sequential(
                nn.Linear(pixels + condition, hidden), make_activation(activation)
            )
            return
        start, halvings = conv_plan(image_size)
        width = max(hidden >> halvings, 8)
        layers: list[nn.Module] = [
            nn.Conv2d(channels, width, 3, padding=1),
            make_activation(activation),
        ]
        for _ in range(halvings):
            wider = min(2 * width, hidden)
            layers += [nn.Conv2d(width, wider, 4, stride=2, padding=1), make_activation(activation)]
            width = wider
        self.image = nn.Sequential(*layers, nn.Flatten())
        self.joined = nn.Sequential(
            nn.Linear(width * start**2 + condition, hidden), make_activation(activation)
        )

    def forward(self, image_bchw: Tensor, condition_bd: Tensor | None = None) -> Tensor:
        features: Tensor = self.joined(join(self.image(image_bchw), condition_bd))
        return features


def make_activation(name: Activation) -> nn.Module:
    """Return a fresh activation module; a PReLU has a parameter and must not be shared."""
    if name == "prelu":
        return nn.PReLU()
    return nn.LeakyReLU(0.2) if name == "leaky_relu" else nn.ReLU()


def conv_plan(image_size: int) -> tuple[int, int]:
    """Return the side of the smallest feature map (4 to 7) and how often it is doubled to reach `image_size`."""
    side, doublings = image_size, 0
    while side > _LARGEST_MAP and side % 2 == 0:
        side, doublings = side // 2, doublings + 1
    if not _SMALLEST_MAP <= side <= _LARGEST_MAP:
        raise ConfigError(
            f"model.image_size: a conv body cannot make {image_size} pixels; the nearest sizes that it can make are "
            f"{_nearest_sizes(image_size)} (4, 5, 6 or 7 times a power of two). Choose one of them, or "
            "model.body: mlp, which makes any size."
        )
    return side, doublings


def _nearest_sizes(image_size: int) -> str:
    possible = sorted(
        side << power for side in range(_SMALLEST_MAP, _LARGEST_MAP + 1) for power in range(9)
    )
    nearest = sorted(possible, key=lambda size: abs(size - image_size))[:3]
    return ", ".join(str(size) for size in sorted(nearest))


def join(first_bd: Tensor, second_bd: Tensor | None) -> Tensor:
    """Concatenate two vectors per sample, the second in the first's dtype; without a second, return the first."""
    return (
        first_bd
        if second_bd is None
        else torch.cat((first_bd, second_bd.to(first_bd.dtype)), dim=1)
    )


def one_hot(label_b: Tensor, classes: int) -> Tensor:
    """Return float32 (b, classes) without looking at the labels' values, as `F.one_hot` does and planning may not."""
    return (label_b.unsqueeze(1) == torch.arange(classes, device=label_b.device)).float()


def check_image(data: DataSpec, image_size: int, channels: int, model: str) -> None:
    """Refuse data whose images are not like the model's."""
    if not 1 <= image_size <= LARGEST_IMAGE:
        raise ConfigError(f"model.image_size: {image_size} is not between 1 and {LARGEST_IMAGE}.")
    found, wanted = (
        data.require("image", f"model {model}").shape,
        (channels, image_size, image_size),
    )
    if tuple(found) != wanted:
        raise DataError(
            f"model {model}: it makes {wanted[1]}x{wanted[2]} images with {channels} channels, but the data "
            f"set delivers {'x'.join(map(str, found))} (channels x height x width). Set model.image_size and "
            "model.channels to the data set's, or leave dataset.image_size and dataset.channels "
            "out so that they follow the model."
        )


def class_count(data: DataSpec, model: str) -> int:
    """Return the number of classes; refuse data without labels."""
    if "label" not in data.fields or len(data.classes) < 2:
        raise DataError(
            f"model {model}: it is class-conditional, and this data set has no labels (or only one class). Use a "
            "data set with classes, such as digits or an image folder with one subfolder per class, or a model "
            "without labels."
        )
    return len(data.classes)
