"""Augmentation of everything the discriminator sees, at a probability that follows its overfitting (ADA).

Flips, quarter turns and shifts by pixels; scaling, rotation, stretching and fractional shifts; brightness, contrast,
inversion of luma, hue and saturation. Geometry is one affine map and one bilinear read, colour one affine map per
sample. The random numbers are an argument: `uniforms` (b, `DRAWS`), so that one draw serves a batch however it is
split. The probability is a buffer on the device; nothing here reads it.

The original's wavelet filter around the geometric part is `filters`. Left out: image-space filtering and cutout.
Source: Karras et al. 2020, "Training generative adversarial networks with limited data", section 2 and appendix B.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mpt.systems.stylegan2.nn.shared.resampling import sample_affine, sample_affine_filtered, symlet

DRAWS = 32
"""Uniform numbers per sample."""


class AdaptiveAugment(nn.Module):
    """Augment images in [-1, 1] with the probability in `probability`; steer it by `steer`."""

    probability: Tensor
    taps: Tensor | None

    def __init__(self, filters: bool = False) -> None:
        super().__init__()
        self.register_buffer("probability", torch.zeros(()))
        self.register_buffer("taps", symlet() if filters else None, persistent=False)

    def forward(self, image_bchw: Tensor, uniforms_bn: Tensor) -> Tensor:
        draws = Draws(uniforms_bn, self.probability)
        # coordinates have no digits to lose
        with torch.autocast(image_bchw.device.type, enabled=False):
            matrix = geometry(draws, image_bchw.shape[3])[:, :2]
            if self.taps is None:
                return colour(sample_affine(image_bchw, matrix), draws)
            moved = sample_affine_filtered(image_bchw, matrix, self.taps)
            return colour(moved, draws)

    @torch.no_grad()
    def steer(self, sign: Tensor, target: float, step: float) -> None:
        """Raise the probability by `step` if the mean sign of the real scores exceeds the target, else lower it."""
        self.probability.add_(torch.sign(sign - target) * step).clamp_(0, 1)


class Draws:
    """Hand out one column of uniform numbers after the other, gated by the probability."""

    def __init__(self, uniforms_bn: Tensor, probability: Tensor) -> None:
        self.columns = iter(uniforms_bn.float().unbind(1))
        self.probability = probability

    def uniform(self) -> Tensor:
        """Return the next column (b,) of numbers in [0, 1)."""
        return next(self.columns)

    def gate(self, value: Tensor, neutral: float, probability: Tensor | None = None) -> Tensor:
        """Return values (b,) or (..., b) if the next draw is below the probability, else the neutral one."""
        chance = self.probability if probability is None else probability
        return torch.where(self.uniform() < chance, value, torch.full_like(value, neutral))

    def normal(self) -> Tensor:
        """Return normal numbers (b,) from the next column."""
        normal: Tensor = torch.special.ndtri(self.uniform().clamp(1e-6, 1 - 1e-6))
        return normal


def geometry(draws: Draws, image_size: int) -> Tensor:
    """Return (b, 3, 3): the map from output to input coordinates, each from -1 to 1 over the image."""
    matrix = _scale(1 - 2 * draws.gate((draws.uniform() * 2).floor(), 0.0), None)
    matrix = matrix @ _rotation(draws.gate((draws.uniform() * 4).floor(), 0.0) * (math.pi / 2))
    # Both directions of a shift happen together or not at all.
    for_pixels = draws.gate(torch.stack([(draws.uniform() * 2 - 1) * 0.125 for _ in range(2)]), 0.0)
    matrix = matrix @ _shift(*((for_pixels * image_size).round() * (2 / image_size)))
    size = draws.gate(torch.exp2(draws.normal() * 0.2), 1.0)
    matrix = matrix @ _scale(1 / size, 1 / size)
    # Two rotations around a stretch: together they happen with the probability, hence the root.
    once = 1 - (1 - draws.probability).sqrt()
    matrix = matrix @ _rotation(draws.gate((draws.uniform() * 2 - 1) * math.pi, 0.0, once))
    stretch = draws.gate(torch.exp2(draws.normal() * 0.2), 1.0)
    matrix = matrix @ _scale(1 / stretch, stretch)
    matrix = matrix @ _rotation(draws.gate((draws.uniform() * 2 - 1) * math.pi, 0.0, once))
    return matrix @ _shift(*draws.gate(torch.stack([draws.normal() * 0.25 for _ in range(2)]), 0.0))


def colour(image_bchw: Tensor, draws: Draws) -> Tensor:
    """Return each sample with its colours mapped; without three channels, only brightness and contrast."""
    brightness = draws.gate(draws.normal() * 0.2, 0.0)[:, None, None, None]
    contrast = draws.gate(torch.exp2(draws.normal() * 0.5), 1.0)[:, None, None, None]
    image = (image_bchw + brightness) * contrast
    if image.shape[1] != 3:
        return image
    grey_axis = torch.full((3,), 1 / math.sqrt(3), device=image.device)
    along = torch.outer(grey_axis, grey_axis)
    identity = torch.eye(3, device=image.device)
    flip = draws.gate((draws.uniform() * 2).floor(), 0.0)[:, None, None]
    matrix = identity - 2 * flip * along
    angle = draws.gate((draws.uniform() * 2 - 1) * math.pi, 0.0)[:, None, None]
    # [[0, -1, 1], [1, 0, -1], [-1, 1, 0]], without the blocking copy to the GPU that a list would be
    cross = (identity.roll(1, 0) - identity.roll(2, 0)) / math.sqrt(3)
    hue = along + (identity - along) * angle.cos() + cross * angle.sin()
    saturation = draws.gate(torch.exp2(draws.normal()), 1.0)[:, None, None]
    matrix = (along + (identity - along) * saturation) @ hue @ matrix
    return (matrix @ image.flatten(2)).reshape(image.shape)


def _matrix(rows: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)


def _scale(x: Tensor, y: Tensor | None) -> Tensor:
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    return _matrix([[x, zero, zero], [zero, one if y is None else y, zero], [zero, zero, one]])


def _rotation(angle: Tensor) -> Tensor:
    zero, one = torch.zeros_like(angle), torch.ones_like(angle)
    cos, sin = angle.cos(), angle.sin()
    return _matrix([[cos, -sin, zero], [sin, cos, zero], [zero, zero, one]])


def _shift(x: Tensor, y: Tensor) -> Tensor:
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    return _matrix([[one, zero, x], [zero, one, y], [zero, zero, one]])
