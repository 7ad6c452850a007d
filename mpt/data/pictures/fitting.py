"""Bring images to the size and the channels that a data set promises."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mpt.errors import ConfigError, DataError

LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's conversion to "L"


def fit_images(image_bchw: Tensor, image_size: int, channels: int) -> Tensor:
    """Return float images as (b, `channels`, `image_size`, `image_size`); those that fit already are returned as they
    are.

    Bilinear with antialiasing. Images that are not square are stretched; pictures from files are cut square
    before.
    """
    image_bchw = match_channels(image_bchw, channels)
    if image_bchw.shape[-2:] != (image_size, image_size):
        image_bchw = functional.interpolate(
            image_bchw,
            (image_size, image_size),
            mode="bilinear",
            antialias=True,
            align_corners=False,
        ).clamp_(0, 1)
    return image_bchw.contiguous()


def match_channels(image_bchw: Tensor, channels: int) -> Tensor:
    """Return images with 1, 3 or 4 channels: grey repeated, colour reduced to luminance, alpha opaque or dropped."""
    found = image_bchw.shape[1]
    if found == channels:
        return image_bchw
    if channels not in (1, 3, 4) or found not in (1, 3, 4):
        kind = DataError if channels in (1, 3, 4) else ConfigError
        raise kind(
            f"images of {found} channels cannot become {channels}; set dataset.channels to 1, 3 or 4"
        )
    colour = image_bchw[:, :3]
    if channels == 1:
        weights = image_bchw.new_tensor(LUMINANCE).view(1, 3, 1, 1)
        return (colour * weights).sum(1, keepdim=True)
    colour = colour.expand(-1, 3, -1, -1)
    return colour if channels == 3 else torch.cat([colour, torch.ones_like(colour[:, :1])], dim=1)
