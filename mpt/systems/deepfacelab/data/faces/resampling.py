"""Shrinking and cutting of pictures as OpenCV does it, which DeepFaceLab calls: cubic with a of -0.75, no antialias.

Without antialias a picture that shrinks by more than two is sampled, not averaged: sharper, with aliasing. It is kept
because networks that DeepFaceLab trained have seen such pictures. Pixels count from their centres.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mpt.systems.deepfacelab.data.faces.face_geometry import Matrix, invert


def resize(image_chw: Tensor, size: int, mode: str) -> Tensor:
    """Return a float image with sides of `size` pixels; `mode` is bilinear or bicubic, which may overshoot."""
    if image_chw.shape[-2:] == (size, size):
        return image_chw
    return F.interpolate(image_chw[None], (size, size), mode=mode, align_corners=False)[0]


def cut(
    image_chw: Tensor, matrix: Matrix, size: int | tuple[int, int], mode: str, beyond: str
) -> Tensor:
    """Return the image mapped by a matrix onto `size` (height, width) pixels.

    `beyond` its borders there is its edge ("border") or zero ("zeros").
    """
    height, width = (size, size) if isinstance(size, int) else size
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    inverse = invert(matrix)
    grid: np.ndarray[Any, Any] = np.stack((x, y), -1) @ inverse[:, :2].T + inverse[:, 2]
    sides = np.array([image_chw.shape[-1], image_chw.shape[-2]])
    grid = (grid * 2 + 1) / sides - 1
    sampled = torch.from_numpy(grid).to(image_chw)[None]
    return F.grid_sample(
        image_chw[None], sampled, mode=mode, padding_mode=beyond, align_corners=False
    )[0]
