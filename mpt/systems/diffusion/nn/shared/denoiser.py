"""The interface of a denoising network for the task."""

from __future__ import annotations

from torch import Tensor, nn


class Denoiser(nn.Module):
    """Noisy pictures (b, c, h, w), levels in ticks (b,) and conditions, in the order of `conditions`, to answers.

    Levels are read with `mpt.systems.diffusion.nn.shared.embedding.from_ticks`.
    """

    conditions: tuple[str, ...] = ()
    """Batch fields that the network is given; `label` is a class (b,)."""
    classes: int = 0
    """Classes that it tells apart; 0 without the condition `label`."""
    has_none: bool = True
    """Whether the class `classes` means a picture whose class is left out."""

    def forward(self, noisy_bchw: Tensor, ticks_b: Tensor, *conditions: Tensor) -> Tensor:
        raise NotImplementedError
