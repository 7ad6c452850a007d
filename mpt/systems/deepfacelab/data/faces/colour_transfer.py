"""Give one picture the colours of another, in DeepFaceLab's ways, for the source's faces and for merging.

- rct: mean and deviation of each channel in L*a*b* (Reinhard et al., "Color transfer between images", 2001);
- lct: mean and covariance, by the symmetric roots of both covariances;
- mkl: mean and covariance, by the least movement (Pitié and Kokaram, "The linear Monge-Kantorovitch linear colour
  mapping for example-based colour transfer", 2007);
- idt: the whole distribution, along random axes in turn (Pitié et al., "N-dimensional probability density function
  transfer", 2005);
- sot: the whole distribution, along random directions together (Bonneel et al., "Sliced and Radon Wasserstein
  barycenters of measures", 2015), its change smoothed by a bilateral filter;
- mix: sot of the colours at one lightness, and the lightness by mean and deviation;
- the histogram of each channel, up to a threshold.

Pictures are float32 (h, w, 3) in [0, 1], B, G, R as OpenCV's. idt, sot and mix draw from the generator they are given.
Clipped, empty and masked pixels are treated as in DeepFaceLab, oddities included (docs/how-to/merging.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from mpt.systems.deepfacelab.data.faces.opencv import opencv

Picture = np.ndarray[Any, np.dtype[Any]]
IDT_ROTATIONS, IDT_BINS = 20, 256
SOT_STEPS, SOT_DIRECTIONS = 10, 5
SOT_SPACE, SOT_RANGE = 16.0, 5.0
"""Deviations of the bilateral filter, in pixels and in the picture's values; its window reaches 1.5 of the first."""
MIX_LIGHTNESS = 100
CUTOFF = 0.5
TINY = 1e-5


class Normals(Protocol):
    """A source of normal numbers: any of NumPy's generators."""

    def normal(self, *, size: Any) -> Any: ...


def transfer(
    mode: str,
    image: Picture,
    reference: Picture,
    numbers: Normals,
    directions: int = SOT_DIRECTIONS,
) -> Picture:
    """Return the image with the reference's colours, in [0, 1]. `mode` is one of the table's names.

    `directions` of a step of sot are 5 in training and 30 when merging.
    """
    if mode == "rct":
        result = reinhard(image, reference)
    elif mode == "lct":
        result = match_covariance(image, reference)
    elif mode == "mkl":
        result = move_least(image, reference)
    elif mode == "idt":
        result = iterate_distribution(
            image, reference, (random_rotation(numbers) for _ in range(IDT_ROTATIONS))
        )
    elif mode == "mix":
        result = mix(image, reference, numbers)
    else:
        assert mode == "sot", mode
        result = slice_transport(image, reference, numbers, directions)
    return np.asarray(result.clip(0, 1), np.float32)


def reinhard(
    image: Picture,
    reference: Picture,
    image_mask: Picture | None = None,
    reference_mask: Picture | None = None,
    cutoff: float = CUTOFF,
) -> Picture:
    """Match mean and deviation of each channel in L*a*b*.

    If a mask (h, w, 1) is below the cutoff a pixel counts as black; all pixels are changed.
    """
    cv2 = opencv()
    target, source = (
        cv2.cvtColor(np.ascontiguousarray(one, np.float32), cv2.COLOR_BGR2LAB)
        for one in (image, reference)
    )
    counted = []
    for values, mask in ((target, image_mask), (source, reference_mask)):
        known = values if mask is None else np.where(mask < cutoff, np.float32(0), values)
        counted.append(known.reshape(-1, 3).astype(np.float64))
    (mean, deviation), (wanted_mean, wanted) = (
        (values.mean(axis=0), values.std(axis=0)) for values in counted
    )
    matched = (target - mean) * (wanted / np.maximum(deviation, TINY)) + wanted_mean
    matched = matched.clip([0, -127, -127], [100, 127, 127]).astype(np.float32)
    return np.asarray(cv2.cvtColor(matched, cv2.COLOR_LAB2BGR).clip(0, 1))


def match_covariance(image: Picture, reference: Picture) -> Picture:
    """Match mean and covariance of any number of channels by the symmetric roots of the covariances."""
    roots, means = [], []
    for picture in (image, reference):
        points = picture.reshape(-1, picture.shape[-1]).astype(np.float64)
        means.append(points.mean(axis=0))
        centred = points - means[-1]
        covariance = centred.T @ centred / len(points) + TINY * np.eye(points.shape[1])
        roots.append(symmetric_root(covariance))
    matrix = roots[1] @ np.linalg.inv(roots[0])
    matched: Picture = (image - means[0]) @ matrix.T + means[1]
    return matched.clip(0, 1)


def move_least(image: Picture, reference: Picture) -> Picture:
    """Match mean and covariance by the least movement of colours."""
    points, wanted = (picture.reshape(-1, 3).astype(np.float64) for picture in (image, reference))
    covariance, wanted_covariance = np.cov(points.T), np.cov(wanted.T)
    root = symmetric_root(covariance)
    inverse = np.linalg.pinv(root)
    matrix = inverse @ symmetric_root(root @ wanted_covariance @ root) @ inverse
    matched: Picture = ((points - points.mean(axis=0)) @ matrix.T + wanted.mean(axis=0)).reshape(
        image.shape
    )
    return matched


def symmetric_root(matrix: Picture) -> Picture:
    """Return the symmetric square root."""
    values, vectors = np.linalg.eigh(matrix)
    root: Picture = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    return root


def iterate_distribution(
    image: Picture, reference: Picture, rotations: Iterable[Picture]
) -> Picture:
    """Match the histograms along the axes of rotations (3, 3), one after another, each time a 20th of the way.

    The values in an axis' lowest bin are sent to zero, as in DeepFaceLab.
    """
    points, wanted = (
        image.reshape(-1, 3).astype(np.float64),
        reference.reshape(-1, 3).astype(np.float64),
    )
    for axes in rotations:
        turned, turned_wanted = points @ axes.T, wanted @ axes.T
        matched = np.empty_like(turned)
        for axis in range(3):
            ours, theirs = turned[:, axis], turned_wanted[:, axis]
            edges = np.linspace(
                min(ours.min(), theirs.min()), max(ours.max(), theirs.max()), IDT_BINS + 1
            )
            share, wanted_share = (
                np.histogram(v, edges)[0].cumsum() / len(v) for v in (ours, theirs)
            )
            mapped = np.interp(share, wanted_share, edges[1:])
            matched[:, axis] = np.interp(ours, edges[1:], mapped, left=0)
        points = points + (matched - turned) @ axes / IDT_ROTATIONS
    return np.asarray(points.reshape(image.shape))


def slice_transport(
    image: Picture,
    reference: Picture,
    numbers: Normals,
    directions: int = SOT_DIRECTIONS,
    *,
    smoothed: bool = True,
) -> Picture:
    """Move the colours along random directions, sorted onto the reference's, and smooth the movement."""
    points, wanted = (picture.reshape(-1, 3).astype(np.float32) for picture in (image, reference))
    start = points.copy()
    for _ in range(SOT_STEPS):
        moved = np.zeros_like(points)
        for _ in range(directions):
            direction = np.asarray(numbers.normal(size=3)).astype(np.float32)
            direction /= np.linalg.norm(direction)
            ours: Picture = (points * direction).sum(axis=1)
            theirs: Any = np.sort((wanted * direction).sum(axis=1))
            if len(theirs) != len(ours):
                places = np.linspace(0, 1, len(ours)), np.linspace(0, 1, len(theirs))
                theirs = np.asarray(np.interp(*places, theirs))
            order = np.argsort(ours)
            moved[order] += (theirs - ours[order]).astype(np.float32)[:, None] * direction
        points += moved / directions
    if not smoothed:
        return np.asarray(points.reshape(image.shape))
    change = np.ascontiguousarray((points - start).reshape(image.shape))
    return np.asarray(
        start.reshape(image.shape) + opencv().bilateralFilter(change, 0, SOT_RANGE, SOT_SPACE)
    )


def mix(image: Picture, reference: Picture, numbers: Normals) -> Picture:
    """Match the lightness by mean and deviation, and the colours, all at one lightness, as `slice_transport` does.

    It works on whole grey levels, so the filter's range is five of them.
    """
    cv2 = opencv()
    lab = [
        cv2.cvtColor(whole_levels(picture * 255), cv2.COLOR_BGR2LAB)
        for picture in (image, reference)
    ]
    lightness = [picture[..., :1].astype(np.float32) / 255 for picture in lab]
    light = whole_levels(match_covariance(*lightness)[..., 0] * 255)
    colours = []
    for picture in lab:
        picture[..., 0] = MIX_LIGHTNESS
        colours.append(cv2.cvtColor(picture, cv2.COLOR_LAB2BGR).astype(np.float32))
    moved = cv2.cvtColor(
        whole_levels(slice_transport(colours[0], colours[1], numbers)), cv2.COLOR_BGR2LAB
    )
    moved[..., 0] = light
    return np.asarray(cv2.cvtColor(moved, cv2.COLOR_LAB2BGR) / np.float32(255))


def whole_levels(values: Picture) -> Picture:
    """Return grey levels cut off to whole numbers."""
    return np.asarray(values.clip(0, 255).astype(np.uint8))


def match_histogram(image: Picture, reference: Picture, threshold: int = 255) -> Picture:
    """Match each channel's histogram to the reference's, up to `threshold` / 255 of the way through the reference's."""
    result = np.empty_like(image)
    for channel in range(image.shape[-1]):
        _, places, counts = np.unique(image[..., channel], return_inverse=True, return_counts=True)
        wanted, wanted_counts = np.unique(reference[..., channel], return_counts=True)
        share = threshold * counts.cumsum() / counts.sum()
        mapped = np.interp(share, 255 * wanted_counts.cumsum() / wanted_counts.sum(), wanted)
        result[..., channel] = mapped[places].reshape(image.shape[:2])
    return result


def random_rotation(numbers: Normals) -> Picture:
    """Return a rotation drawn evenly from all."""
    matrix, triangle = np.linalg.qr(np.asarray(numbers.normal(size=(3, 3))))
    matrix = matrix * np.sign(np.diag(triangle))
    return np.asarray(matrix * np.array([np.sign(np.linalg.det(matrix)), 1, 1]))
