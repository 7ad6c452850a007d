"""XSeg, DeepFaceLab's network that draws the mask of a face, for training (`nn/facelib/xseg.py` has its layers).

Weights start as there: Glorot's uniform ones, biases and thresholds 0. A run becomes DeepFaceLab's files and back with
`mpt deepfacelab torch-to-leras` and `leras-to-torch`, at 256 pixels and width 32, the only ones that it knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from torch import nn

from mpt.config.options import ModelOptions
from mpt.seams import DataSpec
from mpt.systems.deepfacelab.nn.facelib.xseg import Block, XSeg

TASK = "face_mask"


class Settings(ModelOptions):
    image_size: int = Field(256, ge=64, le=1024, multiple_of=64)
    """Sides of the faces in pixels. DeepFaceLab's XSeg has 256."""
    channels: Literal[3] = 3
    width: int = Field(32, ge=1, le=256)
    """Channels of the first level; the others have up to eight times as many. DeepFaceLab's XSeg has 32."""


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Return `xseg` with fresh weights."""
    network = XSeg(settings.image_size, settings.width)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return {"xseg": network}


def units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the repeated stages, in the order of the forward pass, for recomputation."""
    for child in module.modules():
        if isinstance(child, Block):
            yield child
