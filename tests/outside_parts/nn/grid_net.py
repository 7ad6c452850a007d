"""A network that answers with an object's score and box in each cell of a grid of 8 pixels."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn

from mpt.config.options import Options
from mpt.seams import DataSpec, log

TASK = "find_boxes"


class Settings(Options):
    features: int = Field(16, ge=1)
    """Width of the first stage."""


class Grid(nn.Sequential):
    def forward(self, view: Tensor) -> Tensor:
        answer: Tensor = super().forward(view)
        log("answer", answer.abs())
        return answer


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Build `net`: (b, c, h, w) to (b, 5, h / 8, w / 8)."""
    channels = data.require("view", "model grid_net").shape[0]
    layers: list[nn.Module] = []
    for stage in range(3):
        width = settings.features * 2**stage
        layers += [
            nn.Conv2d(channels, width, 3, stride=2, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
        ]
        channels = width
    return {"net": Grid(*layers, nn.Conv2d(channels, 5, 1))}
