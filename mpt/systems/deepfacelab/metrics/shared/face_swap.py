"""How good drawn faces and masks are: peak signal to noise, and the overlap of masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def peak_signal_to_noise(first: Tensor, second: Tensor) -> Tensor:
    """Return the PSNR of each sample in dB, for images (b c h w) in [0, 1]; 100 dB for equal ones."""
    error = (first - second).square().mean(dim=(1, 2, 3)).clamp(min=1e-10)
    return -10 / math.log(10) * torch.log(error)


def overlap(first: Tensor, second: Tensor) -> Tensor:
    """Return each sample's intersection over union of two masks (b 1 h w), cut at one half; 1 for two empty masks."""
    one, other = first > 0.5, second > 0.5
    common = (one & other).sum(dim=(1, 2, 3))
    either = (one | other).sum(dim=(1, 2, 3))
    return torch.where(either > 0, common / either.clamp(min=1), 1.0)
