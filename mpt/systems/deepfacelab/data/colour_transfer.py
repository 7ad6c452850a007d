"""Give one picture the colours of another: the five ways that DeepFaceLab offers for the source's faces.

- rct: mean and deviation of each channel in L*a*b* (Reinhard et al., "Color transfer between images", 2001);
- lct: mean and covariance in RGB, by principal axes;
- mkl: mean and covariance, by the least movement (Pitié and Kokaram, "The linear Monge-Kantorovitch linear colour
  mapping for example-based colour transfer", 2007);
- idt: the whole distribution, along random axes in turn (Pitié et al., "N-dimensional probability density function
  transfer", 2005);
- sot: the whole distribution, along random directions together (Bonneel et al., "Sliced and Radon Wasserstein
  barycenters of measures", 2015).

Pictures are float32 (h, w, 3) RGB in [0, 1]. idt and sot draw from the generator they are given. sot smooths its change
with a Gaussian where DeepFaceLab has a bilateral filter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import ndimage

Picture = np.ndarray[Any, np.dtype[Any]]
TO_XYZ = np.array([[0.412453, 0.357580, 0.180423], [0.212671, 0.715160, 0.072169], [0.019334, 0.119193, 0.950227]])
WHITE = np.array([0.950456, 1.0, 1.088754])
LAB_EDGE = 0.008856
IDT_ROTATIONS, IDT_BINS = 20, 256
SOT_STEPS, SOT_DIRECTIONS, SOT_SIGMA = 10, 5, 16.0
TINY = 1e-5


def transfer(mode: str, image: Picture, reference: Picture, numbers: np.random.Generator) -> Picture:
    """Return the image with the reference's colours, in [0, 1]. `mode` is one of the table's names."""
    if mode == "rct":
        result = reinhard(image, reference)
    elif mode == "lct":
        result = match_covariance(image, reference, "pca")
    elif mode == "mkl":
        result = match_covariance(image, reference, "least movement")
    elif mode == "idt":
        result = iterate_distribution(image, reference, numbers)
    else:
        assert mode == "sot", mode
        result = slice_transport(image, reference, numbers)
    return np.asarray(result.clip(0, 1), np.float32)


def reinhard(image: Picture, reference: Picture, image_part: Any = None, reference_part: Any = None) -> Picture:
    """Match mean and deviation of each channel in L*a*b*; parts are masks of the pixels that count."""
    target, source = to_lab(image), to_lab(reference)
    counted = [
        values.reshape(-1, 3) if part is None else values[part] if part.any() else values.reshape(-1, 3)
        for values, part in ((target, image_part), (source, reference_part))
    ]
    (mean, deviation), (wanted_mean, wanted) = ((v.mean(axis=0), v.std(axis=0)) for v in counted)
    matched = (target - mean) * (wanted / np.maximum(deviation, TINY)) + wanted_mean
    return from_lab(matched.clip([0, -127, -127], [100, 127, 127])).clip(0, 1)


def match_covariance(image: Picture, reference: Picture, way: str) -> Picture:
    """Match mean and covariance by a linear map."""
    target, source = image.reshape(-1, 3).astype(np.float64), reference.reshape(-1, 3).astype(np.float64)
    mean, wanted = target.mean(axis=0), source.mean(axis=0)
    covariance = np.cov(target.T) + TINY * np.eye(3)
    wanted_covariance = np.cov(source.T) + TINY * np.eye(3)
    if way == "pca":
        matrix = axes_root(wanted_covariance) @ np.linalg.inv(axes_root(covariance))
    else:
        root = symmetric_root(covariance)
        inverse = np.linalg.inv(root)
        matrix = inverse @ symmetric_root(root @ wanted_covariance @ root) @ inverse
    matched: Picture = ((target - mean) @ matrix.T + wanted).reshape(image.shape)
    return matched


def symmetric_root(matrix: Picture) -> Picture:
    """Return the symmetric square root."""
    values, vectors = np.linalg.eigh(matrix)
    root: Picture = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    return root


def axes_root(matrix: Picture) -> Picture:
    """Return the square root along the principal axes, smallest first, each axis pointing one way.

    An axis has no direction by itself; without a rule a colour could be turned into its opposite.
    """
    values, vectors = np.linalg.eigh(matrix)
    vectors = vectors * np.where(vectors.sum(axis=0) < 0, -1.0, 1.0)
    root: Picture = vectors * np.sqrt(values.clip(0))
    return root


def iterate_distribution(image: Picture, reference: Picture, numbers: np.random.Generator) -> Picture:
    """Match the histograms along three random axes, again and again, each time a 20th of the way."""
    points, wanted = image.reshape(-1, 3).astype(np.float64), reference.reshape(-1, 3).astype(np.float64)
    for _ in range(IDT_ROTATIONS):
        axes = random_rotation(numbers)
        turned, turned_wanted = points @ axes.T, wanted @ axes.T
        matched = np.empty_like(turned)
        for axis in range(3):
            ours, theirs = turned[:, axis], turned_wanted[:, axis]
            edges = np.linspace(min(ours.min(), theirs.min()), max(ours.max(), theirs.max()), IDT_BINS + 1)
            share, wanted_share = (np.histogram(v, edges)[0].cumsum() / len(v) for v in (ours, theirs))
            mapped = np.interp(share, wanted_share, edges[1:])
            matched[:, axis] = np.interp(ours, edges[1:], mapped)
        points = points + (matched - turned) @ axes / IDT_ROTATIONS
    return np.asarray(points.reshape(image.shape))


def slice_transport(image: Picture, reference: Picture, numbers: np.random.Generator) -> Picture:
    """Move the colours along random directions, sorted onto the reference's, and smooth the movement."""
    points, wanted = image.reshape(-1, 3).astype(np.float64), reference.reshape(-1, 3).astype(np.float64)
    for _ in range(SOT_STEPS):
        moved = np.zeros_like(points)
        for _ in range(SOT_DIRECTIONS):
            direction = numbers.normal(size=3)
            direction /= np.linalg.norm(direction)
            ours, theirs = points @ direction, np.sort(wanted @ direction)
            if len(theirs) != len(ours):
                theirs = np.interp(np.linspace(0, 1, len(ours)), np.linspace(0, 1, len(theirs)), theirs)
            order = np.argsort(ours)
            moved[order] += (theirs - ours[order])[:, None] * direction
        points = points + moved / SOT_DIRECTIONS
    change = (points - image.reshape(-1, 3)).reshape(image.shape)
    return np.asarray(image + ndimage.gaussian_filter(change, (SOT_SIGMA / 4, SOT_SIGMA / 4, 0)))


def random_rotation(numbers: np.random.Generator) -> Picture:
    """Return a rotation drawn evenly from all."""
    matrix, triangle = np.linalg.qr(numbers.normal(size=(3, 3)))
    matrix = matrix * np.sign(np.diag(triangle))
    return np.asarray(matrix * np.array([np.sign(np.linalg.det(matrix)), 1, 1]))


def to_lab(image: Picture) -> Picture:
    """Return L* in [0, 100], a* and b* of sRGB values, for the white of D65."""
    values = image.astype(np.float64)
    linear = np.where(values > 0.04045, ((values.clip(0) + 0.055) / 1.055) ** 2.4, values / 12.92)
    xyz = linear @ TO_XYZ.T / WHITE
    folded = np.where(xyz > LAB_EDGE, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    x, y, z = np.moveaxis(folded, -1, 0)
    return np.asarray(np.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), -1))


def from_lab(lab: Picture) -> Picture:
    """Return sRGB values of L*a*b*."""
    y = (lab[..., 0] + 16) / 116
    folded = np.stack((y + lab[..., 1] / 500, y, y - lab[..., 2] / 200), -1)
    xyz = np.where(folded**3 > LAB_EDGE, folded**3, (folded - 16 / 116) / 7.787) * WHITE
    linear = xyz @ np.linalg.inv(TO_XYZ).T
    return np.asarray(np.where(linear > 0.0031308, 1.055 * linear.clip(0) ** (1 / 2.4) - 0.055, 12.92 * linear))
