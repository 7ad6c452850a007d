"""Position embeddings of a vision transformer for another image size.

A transformer learns one vector per patch of its image's grid. A file made at another size holds another grid; its
vectors are interpolated to the model's, bicubic and antialiased, while those of class and register tokens stay as they
are. Only square grids are recognised, and only tensors of the names that timm and torchvision use.

Source: Dosovitskiy et al., "An image is worth 16x16 words", 2021, section 3.2; timm's `resample_abs_pos_embed`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

NAMES = ("pos_embed", "pos_embedding", "position_embedding", "position_embeddings")
PREFIX_TOKENS = (1, 0, 2, 4, 5)
"""How many tokens a model may put before its patches: a class token; none; a distillation token; registers."""


def resample(name: str, theirs: Tensor, own: Tensor) -> tuple[Tensor, str] | None:
    """Return a file's position embeddings (1, tokens, width) on the model's grid, and "14x14 to 4x4".

    None for a tensor that is none, or whose tokens are no two square grids with equally many tokens before them.
    """
    if name.rpartition(".")[2] not in NAMES or theirs.dim() != 3 or own.dim() != 3:
        return None
    if (
        not theirs.is_floating_point()
        or theirs.shape[0] != own.shape[0]
        or theirs.shape[2] != own.shape[2]
    ):
        return None
    for before in PREFIX_TOKENS:
        old, new = side_of(theirs.shape[1] - before), side_of(own.shape[1] - before)
        if old and new:
            first, patches = theirs[:, :before].float(), theirs[:, before:].float()
            grid = patches.reshape(-1, old, old, patches.shape[2]).permute(0, 3, 1, 2)
            grid = functional.interpolate(grid, size=(new, new), mode="bicubic", antialias=True)
            resized = grid.permute(0, 2, 3, 1).reshape(len(grid), new * new, -1)
            return torch.cat([first, resized], 1), f"{old}x{old} to {new}x{new}"
    return None


def side_of(patches: int) -> int:
    """Return the side of a square grid, 0 if the patches are none."""
    side = math.isqrt(max(patches, 0))
    return side if side * side == patches else 0
