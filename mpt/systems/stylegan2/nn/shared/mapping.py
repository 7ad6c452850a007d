"""The mapping network: latents, and labels if there are classes, to styles.

Latents and the embedded label are each normalised, then concatenated. A discriminator maps labels alone. The running
mean of styles is state that NVIDIA's files have; only `track` moves it.

Source: Karras et al. 2019 (StyleGAN), section 2; Karras et al. 2020 (ADA) for the label.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from mpt.systems.stylegan2.nn.shared.stylegan2_layers import EqualLinear

MEAN_DECAY = 0.995
"""Of the running mean of styles, per batch."""


class Mapping(nn.Module):
    """Map latents (b, latent) and labels (b,) or (b, classes) to styles (b, style)."""

    average: Tensor | None

    def __init__(
        self,
        latent_size: int,
        style_size: int,
        layers: int,
        classes: int = 0,
        tracks_mean: bool = False,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.embed = EqualLinear(classes, style_size) if classes else None
        sizes = [latent_size + (style_size if classes else 0), *[style_size] * layers]
        self.layers = nn.Sequential(
            *(EqualLinear(a, b, lr_multiplier=0.01, activated=True) for a, b in pairwise(sizes))
        )
        self.register_buffer("average", torch.zeros(style_size) if tracks_mean else None)

    def forward(self, latent_bd: Tensor | None, label_b: Tensor | None = None) -> Tensor:
        parts = [] if latent_bd is None else [normalised(latent_bd)]
        if self.embed is not None:
            assert label_b is not None, "a conditional network needs labels"
            parts.append(normalised(self.embed(one_hot(label_b, self.classes))))
        style: Tensor = self.layers(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
        return style

    @torch.no_grad()
    def track(self, latent_bd: Tensor, label_b: Tensor | None = None) -> None:
        """Move the running mean towards the mean style of a batch. Does nothing if none is kept."""
        if self.average is not None:
            mean = self(latent_bd, label_b).float().mean(0)
            self.average.copy_(mean.lerp(self.average.float(), MEAN_DECAY))


def normalised(x_bd: Tensor) -> Tensor:
    """Return rows of unit root mean square, in float32, in which 1e-8 is not zero as in float16."""
    x = x_bd.float()
    return x * (x.square().mean(1, keepdim=True) + 1e-8).rsqrt()


def one_hot(label: Tensor, classes: int) -> Tensor:
    """Return labels (b,) as float32 (b, classes); labels that have that form already are returned as they are."""
    if label.ndim == 2:
        return label.float()
    return (label.unsqueeze(1) == torch.arange(classes, device=label.device)).float()
