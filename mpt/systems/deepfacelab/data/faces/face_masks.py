"""Masks of a face, drawn from its landmarks or from its owner's painting, as DeepFaceLab draws them.

All are float32 (side, side) in [0, 1], at the picture's own resolution: DeepFaceLab draws there and shrinks after.
Points are cut down to whole pixels first, as it does. Filled polygons, dilation and blur follow OpenCV's definitions,
which `test_face_masks.py` compares with OpenCV itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from mpt.systems.deepfacelab.data.faces.face_geometry import Points

Mask = np.ndarray[Any, np.dtype[np.float32]]
HULL_PARTS = (
    (*range(0, 9), 17),
    (*range(8, 17), 26),
    (17, 18, 19, 8),
    (24, 25, 26, 8),
    (*range(19, 25), 8),
    (*range(17, 22), 27, *range(31, 36), 8),
    (*range(22, 27), 27, *range(31, 36), 8),
    tuple(range(27, 36)),
)
"""Landmarks of the convex parts that make up a face: jaws, cheeks, ridge, two round the eyes, nose."""
RIGHT_EYE, LEFT_EYE, INNER_LIPS = range(36, 42), range(42, 48), range(60, 68)


class Polygon(NamedTuple):
    """An area that was drawn by hand: to be taken into the mask, or out of it."""

    includes: bool
    points: Points


def draw_hull(landmarks: Points, side: int, brow_factor: float) -> Mask:
    """Return the face by its landmarks, the brows raised by a factor."""
    points = raise_brows(landmarks, brow_factor)
    return fill(side, (convex_hull(points[list(part)]) for part in HULL_PARTS))


def raise_brows(landmarks: Points, factor: float) -> Points:
    """Return whole-numbered landmarks whose brows are moved away from the eyes by half their distance, times a
    factor.
    """
    points = np.asarray(landmarks).astype(np.int32)
    right_middle = (points[36] + points[0]) // 2
    left_middle = (points[16] + points[45]) // 2
    below_right = np.array([(points[36] + right_middle) // 2, *points[36:40]])
    below_left = np.array([*points[42:46], (points[45] + left_middle) // 2])
    for brow, below in ((slice(17, 22), below_right), (slice(22, 27), below_left)):
        points[brow] = points[brow] + factor * 0.5 * (points[brow] - below)
    return points


def draw_polygons(polygons: Iterable[Polygon], base: Mask) -> Mask:
    """Return the base with polygons laid over it in their order."""
    canvas = Image.fromarray((base * 255).round().astype(np.uint8))
    pencil = ImageDraw.Draw(canvas)
    for polygon in polygons:
        points = [(int(x), int(y)) for x, y in polygon.points]
        if len(points) >= 3:
            value = 255 if polygon.includes else 0
            pencil.polygon(points, fill=value, outline=value)
    return (np.asarray(canvas) / 255).astype(np.float32)


def draw_eyes_mouth(landmarks: Points, side: int) -> Mask:
    """Return the soft region of eyes and inner lips; its edges reach a 16th of the side beyond them."""
    points = np.asarray(landmarks).astype(np.int32)
    eyes = soften(fill(side, [convex_hull(points[list(part)]) for part in (RIGHT_EYE, LEFT_EYE)]))
    mouth = soften(fill(side, [convex_hull(points[list(INNER_LIPS)])]))
    return np.asarray(np.minimum(eyes + mouth, 1), np.float32)


def soften(mask: Mask) -> Mask:
    """Widen a mask by an ellipse of a 32nd of its side and blur it over a 16th."""
    side = len(mask)
    width, reach = side // 32, side // 16 | 1
    rows, columns = np.nonzero(mask)
    result = np.zeros_like(mask)
    if not len(rows):
        return result
    margin = width + reach
    box = tuple(slice(max(0, at.min() - margin), at.max() + margin + 1) for at in (rows, columns))
    part = mask[box]  # most of a face is neither eyes nor mouth
    result[box] = blur(dilate(part, width) if width > 1 else part, reach)
    return result


def dilate(mask: Mask, size: int) -> Mask:
    """Return the pixels at which an ellipse of `size` pixels touches the mask, which is 0 or 1; OpenCV's `dilate`."""
    height, width = mask.shape
    anchor = size // 2
    counts = np.pad(mask > 0, size).cumsum(axis=1, dtype=np.int32)
    counts = np.pad(counts, ((0, 0), (1, 0)))
    result = np.zeros(mask.shape, np.bool_)
    for row, element in enumerate(ellipse(size)):  # row by row of the ellipse, each a run of pixels
        run = np.flatnonzero(element)
        if len(run):
            lines = counts[size + row - anchor :][:height]
            start, end = size + run[0] - anchor, size + run[-1] + 1 - anchor
            result |= lines[:, end : end + width] > lines[:, start : start + width]
    return result.astype(np.float32)


def ellipse(size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return OpenCV's elliptical structuring element with sides of `size` pixels."""
    radius = centre = size // 2
    element = np.zeros((size, size), np.bool_)
    for row in range(size):
        height = row - radius
        if abs(height) <= radius:
            half = round(centre * math.sqrt((radius**2 - height**2) / radius**2)) if radius else 0
            element[row, max(centre - half, 0) : min(centre + half + 1, size)] = True
    return element


def blur(image: Mask, taps: int) -> Mask:
    """Blur by a Gaussian of an odd number of taps, its sigma following from their number as in OpenCV."""
    sigma = 0.3 * ((taps - 1) * 0.5 - 1) + 0.8
    small = {1: [1], 3: [1, 2, 1], 5: [1, 4, 6, 4, 1], 7: [2, 7, 14, 18, 14, 7, 2]}
    distance = np.arange(taps) - taps // 2
    kernel = (
        np.array(small[taps], np.float64)
        if taps in small
        else np.exp(-(distance**2) / (2 * sigma**2))
    )
    kernel = (kernel / kernel.sum()).astype(np.float32)
    rows = ndimage.correlate1d(image, kernel, axis=0, mode="mirror")
    return np.asarray(ndimage.correlate1d(rows, kernel, axis=1, mode="mirror"), np.float32)


def fill(side: int, outlines: Iterable[list[tuple[int, int]]]) -> Mask:
    """Return the union of filled convex polygons with whole-numbered corners, edges included.

    A row is filled from the leftmost to the rightmost pixel of the edges that cross it.
    """
    canvas = np.zeros((side, side), np.bool_)
    columns = np.arange(side)
    for outline in outlines:
        corners = np.array(outline).reshape(-1, 2)
        first, last = np.full(side, side), np.full(side, -1)
        for start, end in zip(corners, np.roll(corners, -1, axis=0)):
            steps = max(1, int(np.abs(end - start).max()))
            line = np.floor(
                start + (end - start) * (np.arange(steps + 1) / steps)[:, None] + 0.5
            ).astype(int)
            line = line[(line[:, 1] >= 0) & (line[:, 1] < side)]
            np.minimum.at(first, line[:, 1], line[:, 0])
            np.maximum.at(last, line[:, 1], line[:, 0])
        rows = slice(
            *(np.flatnonzero(last >= 0)[[0, -1]] + (0, 1)) if (last >= 0).any() else (0, 0)
        )
        canvas[rows] |= (columns >= first[rows, None]) & (columns <= last[rows, None])
    return canvas.astype(np.float32)


def convex_hull(points: Points) -> list[tuple[int, int]]:
    """Return the corners of whole-numbered points' convex hull in order (Andrew's monotone chain)."""
    ordered = sorted({(int(x), int(y)) for x, y in points})
    if len(ordered) < 2:
        return ordered
    chains: list[list[tuple[int, int]]] = []
    for sequence in (ordered, ordered[::-1]):
        chain: list[tuple[int, int]] = []
        for point in sequence:
            while len(chain) > 1 and _turn(chain[-2], chain[-1], point) <= 0:
                chain.pop()
            chain.append(point)
        chains.append(chain[:-1])
    return chains[0] + chains[1]


def _turn(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> int:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
