"""MixUp and CutMix: each image of a batch is mixed with the one before it, and so are their labels.

As in torchvision.transforms.v2, whose classes read tensors' values and so cannot be planned: the same pairs (the batch
rolled by one), the same shares from Beta(alpha, alpha), the same boxes. The numbers come from Python's generator, which
checkpoints keep, so that neither a GPU nor a fake tensor is asked for a value. They are drawn for the whole batch.

Sources: Zhang et al., "mixup: Beyond empirical risk minimization", 2018; Yun et al., "CutMix", 2019.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from mpt.seams import Batch

SHARE, OTHER = "mix_share", "mix_label"


def mix(batch: Batch, mixup: float | None, cutmix: float | None) -> Batch:
    """Return a batch of mixed images by one of the two, a fair coin's if both have an alpha.

    Two fields are added: the labels of the images that were mixed in, and the share of the own ones, per sample.
    """
    kinds: list[Callable[[Tensor], tuple[Tensor, float]]] = []
    if mixup is not None:
        kinds.append(lambda image: blend(image, random.betavariate(mixup, mixup)))
    if cutmix is not None:
        kinds.append(lambda image: paste(image, random.betavariate(cutmix, cutmix)))
    image, share = (kinds[0] if len(kinds) == 1 else random.choice(kinds))(batch["image"])
    label = batch["label"]
    shares = torch.full((len(label),), share, device=label.device)
    return {**batch, "image": image, OTHER: label.roll(1, 0), SHARE: shares}


def blend(image_bchw: Tensor, share: float) -> tuple[Tensor, float]:
    """Return `share` of each image plus the rest of the one before it."""
    return image_bchw.roll(1, 0).mul_(1.0 - share).add_(image_bchw.mul(share)), share


def paste(image_bchw: Tensor, share: float) -> tuple[Tensor, float]:
    """Return each image with a box of the one before it, and the share that is left of the image itself.

    The box has 1 - `share` of the area before it is cut at the border.
    """
    height, width = image_bchw.shape[-2:]
    x, y = random.randrange(width), random.randrange(height)
    half = 0.5 * math.sqrt(1.0 - share)
    left, right = max(x - int(half * width), 0), min(x + int(half * width), width)
    top, bottom = max(y - int(half * height), 0), min(y + int(half * height), height)
    mixed = image_bchw.clone()
    mixed[..., top:bottom, left:right] = image_bchw.roll(1, 0)[..., top:bottom, left:right]
    return mixed, 1.0 - (right - left) * (bottom - top) / (width * height)
