"""SAEHD's losses, per sample and in float32: structure, colour, mask, eyes and mouth, true face, patches.

Values are DeepFaceLab's (facts, not code). With masked training, targets and drawings are compared under a softened
mask whose inside reaches one well before the mask's edge. Every function returns one number per sample, shape (b,),
because DeepFaceLab sums gradients over the batch: the caller sums. Call through `Precision.loss`, which casts up; the
dissimilarity casts up again alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mpt.systems.deepfacelab.losses.shared.dssim import dssim, dssim_at

STRUCTURE = 10.0
COLOUR = 10.0
MASK = 10.0
EYES_MOUTH = 300.0
STYLE = 10_000.0
VARIATION = 1e-6
BACKGROUND = 0.02


def reconstruction(target: Tensor, drawn: Tensor) -> Tensor:
    """Return dissimilarity, at one filter size below 256 pixels and at two from there, plus squared error."""
    side = target.shape[-1]
    if side < 256:
        structure = STRUCTURE * dssim(target, drawn, int(side / 11.6))
    else:
        halves = dssim_at(target, drawn, (int(side / 11.6), int(side / 23.2)))
        structure = STRUCTURE / 2 * (halves[0] + halves[1])
    return structure + COLOUR * (target - drawn).square().mean(dim=(1, 2, 3))


def mask_error(target: Tensor, drawn: Tensor) -> Tensor:
    """Return the weighted squared error between masks (b 1 h w)."""
    return MASK * (target - drawn).square().mean(dim=(1, 2, 3))


def eyes_mouth_error(target: Tensor, drawn: Tensor, region: Tensor) -> Tensor:
    """Return the weighted absolute error inside `region` (b 1 h w), the eyes and the mouth."""
    return EYES_MOUTH * ((target - drawn) * region).abs().mean(dim=(1, 2, 3))


def style_error(drawn: Tensor, style: Tensor) -> Tensor:
    """Return how far the channels' means and deviations are apart, both pictures blurred over an eighth of the side."""
    drawn, style = (blur(picture, picture.shape[-1] // 8) for picture in (drawn, style))
    means = [picture.mean(dim=(2, 3)) for picture in (drawn, style)]
    deviations = [
        (picture.var(dim=(2, 3), correction=0) + 1e-5).sqrt() for picture in (drawn, style)
    ]
    difference = (means[0] - means[1]).square() + (deviations[0] - deviations[1]).square()
    return STYLE * difference.mean(dim=1)


def surround_error(target: Tensor, drawn: Tensor, softened: Tensor) -> Tensor:
    """Return dissimilarity and squared error outside a softened mask."""
    target, drawn = target * (1 - softened), drawn * (1 - softened)
    structure = dssim(drawn, target, int(target.shape[-1] / 11.6))
    return STRUCTURE * structure + COLOUR * (drawn - target).square().mean(dim=(1, 2, 3))


def smooth_surround(image: Tensor, mask: Tensor) -> Tensor:
    """Return the image with its surround, outside the mask, blurred from the surround alone."""
    sigma = image.shape[-1] / 128
    outside = 1 - mask
    weight = 1 - blur(mask, sigma)
    smoothed = blur(image * outside, sigma) / torch.where(weight == 0, 1.0, weight)
    return image * mask + smoothed * outside


def soften(mask: Tensor, stretched: bool = True) -> Tensor:
    """Blur a mask (b 1 h w) with sigma side/32 and, if stretched, let half coverage count in full."""
    blurred = blur(mask, max(1, mask.shape[-1] // 32))
    return (blurred * 2).clamp(0, 1) if stretched else blurred


def blur(image: Tensor, sigma: float) -> Tensor:
    """Blur by a Gaussian of 4 sigma taps (odd, at least 3) with zeros beyond the border; b c h w."""
    taps = max(3, int(4 * sigma)) | 1
    distance = torch.arange(taps, device=image.device, dtype=image.dtype) - taps // 2
    kernel = torch.exp(-distance.square() / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).expand(image.shape[1], 1, taps)
    rows = F.conv2d(image, kernel.unsqueeze(3), padding=(taps // 2, 0), groups=image.shape[1])
    return F.conv2d(rows, kernel.unsqueeze(2), padding=(0, taps // 2), groups=image.shape[1])


def verdict(logits: Tensor, real: bool) -> Tensor:
    """Return the cross-entropy of calling every position of (b 1 h w) logits real, or not."""
    return F.softplus(-logits if real else logits).mean(dim=(1, 2, 3))


def background(target: Tensor, drawn: Tensor, softened: Tensor) -> Tensor:
    """Return the penalty of the unmasked surround under a patch discriminator: total variation and squared error."""
    variation = sum(torch.diff(drawn, dim=axis).square().sum(dim=(1, 2, 3)) for axis in (2, 3))
    outside = (target - drawn) * (1 - softened)
    return VARIATION * variation + BACKGROUND * outside.square().mean(dim=(1, 2, 3))
