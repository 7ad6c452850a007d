"""A model that divides pixels by 255, although data sets deliver 0 to 1, for `scripts/doctor/stranger_data.py`."""

from __future__ import annotations

from torch import Tensor, nn


class DividesAgain(nn.Module):
    """A small network for bytes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, num_classes),
        )

    def forward(self, image_bchw: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.layers(image_bchw / 255)
        return logits
