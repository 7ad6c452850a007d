"""Where one scene ends and another begins: between such frames nothing is to be interpolated.

Two frames are of different scenes when their thumbnails, 32 x 32 and grey, have a structural similarity below a
threshold: motion changes a thumbnail little, a cut changes all of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mpt.systems.dain.metrics.shared.image_quality import structural_similarity

THUMBNAIL = 32
THRESHOLD = 0.2
GREY = (0.299, 0.587, 0.114)


def thumbnail(image_chw: Tensor) -> Tensor:
    """Return a frame, uint8, int32 up to 65535, or floats in [0, 1], as (1, 32, 32) grey floats."""
    most = {torch.uint8: 255, torch.int32: 65535}.get(image_chw.dtype, 1)
    image = image_chw.float() / most
    grey = (image * image.new_tensor(GREY)[:, None, None]).sum(0, keepdim=True)
    return F.interpolate(grey[None], size=(THUMBNAIL, THUMBNAIL), mode="area")[0]


def is_cut(one: Tensor, other: Tensor, threshold: float = THRESHOLD) -> bool:
    """Do two thumbnails belong to different scenes?"""
    return threshold > 0 and float(structural_similarity(one[None], other[None])) < threshold
