"""Whether two estimates of depth agree on which of two points is nearer: what a projection by depth depends on.

DAIN weighs flows by inverse depth, so a difference in scale changes little and a reversed order changes which surface
is in front. The share of pixel pairs in the same order is Kendall's tau, (1 + tau) / 2 of it, over drawn pairs.

Source: Chen et al., "Single-Image Depth Perception in the Wild", 2016, whose WHDR is one minus this.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAIRS = 100_000


def order_kept(exact: Tensor, other: Tensor) -> float:
    """Return the share of drawn pixel pairs with different depths whose order the other estimate keeps; ties are lost.

    The estimates are of one picture and of one shape.
    """
    numbers = torch.Generator().manual_seed(0)
    one, two = torch.randint(exact.numel(), (2, PAIRS), generator=numbers)
    true_order, found_order = (
        (depth.flatten().double().cpu()[one] - depth.flatten().double().cpu()[two]).sign()
        for depth in (exact, other)
    )
    differs = true_order != 0
    return (
        float((found_order == true_order)[differs].double().mean()) if bool(differs.any()) else 1.0
    )
