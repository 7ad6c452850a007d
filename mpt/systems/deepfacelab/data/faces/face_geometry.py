"""Which square of a picture a face is, by its landmarks: DeepFaceLab's alignment and its types of faces.

68 landmarks are fitted to a mean face by a similarity (Umeyama 1991). In the mean face's frame, in which it fills the
unit square, an aligned face is a square around the middle whose half side depends on the type: half a unit and the root
of two times the type's padding. A whole face's square is 0.07 higher; a head's is 0.5 higher, and aside by how far
the head is turned.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Points = np.ndarray[Any, Any]
"""Landmarks (n, 2) in pixels, x before y."""
Matrix = np.ndarray[Any, Any]
"""An affine map (2, 3) of points."""

PADDING = {"h": 0.0, "mf": 0.0675, "f": 0.2109375, "wf": 0.40, "head": 0.70}
"""Padding by type, smallest face first."""
TYPES = {
    "half_face": "h",
    "midfull_face": "mf",
    "full_face": "f",
    "full_face_no_align": "f",
    "whole_face": "wf",
    "head": "head",
    "head_no_align": "head",
}
"""A type's name in metadata -> its name in options. "no_align" squares are upright, as landmarks show as well."""
NUMBERS = {
    0: "half_face",
    1: "midfull_face",
    2: "full_face",
    3: "full_face_no_align",
    4: "whole_face",
}
NUMBERS |= {10: "head", 20: "head_no_align", 100: "mark_only"}
"""The members of DeepFaceLab's enumeration of types."""
USED = [*range(17, 49), 54]
"""Landmarks that are fitted: brows, nose, eyes and the mouth's corners."""
MEAN_FACE = np.array(
    [
        (0.000213256, 0.106454), (0.0752622, 0.038915), (0.18113, 0.0187482), (0.29077, 0.0344891),
        (0.393397, 0.0773906), (0.586856, 0.0773906), (0.689483, 0.0344891), (0.799124, 0.0187482),
        (0.904991, 0.038915), (0.98004, 0.106454), (0.490127, 0.203352), (0.490127, 0.307009),
        (0.490127, 0.409805), (0.490127, 0.515625), (0.36688, 0.587326), (0.426036, 0.609345),
        (0.490127, 0.628106), (0.554217, 0.609345), (0.613373, 0.587326), (0.121737, 0.216423),
        (0.187122, 0.178758), (0.265825, 0.179852), (0.334606, 0.231733), (0.260918, 0.245099),
        (0.182743, 0.244077), (0.645647, 0.231733), (0.714428, 0.179852), (0.793132, 0.178758),
        (0.858516, 0.216423), (0.79751, 0.244077), (0.719335, 0.245099), (0.254149, 0.780233),
        (0.726104, 0.780233),
    ]
)  # fmt: skip
"""The fitted landmarks of the mean face, in its unit square."""


def face_matrix(landmarks: Points, size: int, face_type: str, scale: float = 1.0) -> Matrix:
    """Return the map from a picture with these landmarks to its aligned face with sides of `size` pixels.

    `scale` above 1 takes a smaller square. `face_type` is one of `PADDING`.
    """
    fit = fit_similarity(landmarks[USED], MEAN_FACE)
    middle = np.array([0.5, 0.5])
    if face_type == "wf":
        middle[1] -= 0.07
    elif face_type == "head":
        turn = asymmetry(transform_points(landmarks, fit))
        middle += (turn * abs(math.tanh(2 * turn)) / 2, -0.5)
    half = (PADDING[face_type] * math.sqrt(2) + 0.5) / scale
    grow = size / (2 * half)
    matrix = fit * grow
    matrix[:, 2] -= (middle - half) * grow
    return matrix


def fit_similarity(source: Points, target: Points) -> Matrix:
    """Return the rotation, scaling and shift that take source points nearest to the target's (least squares)."""
    source, target = np.asarray(source, np.float64), np.asarray(target, np.float64)
    from_middle, to_middle = source.mean(axis=0), target.mean(axis=0)
    centred = source - from_middle
    left, stretch, right = np.linalg.svd((target - to_middle).T @ centred / len(source))
    signs = np.array([1.0, np.sign(np.linalg.det(left) * np.linalg.det(right)) or 1.0])
    spread = centred.var(axis=0).sum()
    linear = (left * signs) @ right * ((stretch * signs).sum() / max(spread, 1e-12))
    return np.column_stack((linear, to_middle - linear @ from_middle))


def transform_points(points: Points, matrix: Matrix) -> Points:
    """Return points mapped by a matrix."""
    return np.asarray(points) @ matrix[:, :2].T + matrix[:, 2]


def invert(matrix: Matrix) -> Matrix:
    """Return the inverse of an affine map."""
    linear = np.linalg.inv(matrix[:, :2])
    return np.column_stack((linear, -linear @ matrix[:, 2]))


def asymmetry(landmarks: Points) -> float:
    """Return by how much the cheek beyond the nose's bridge is wider than the one before it, in the points' units."""
    bridge, first, last = landmarks[27:30, 0], landmarks[0:3, 0], landmarks[[16, 15, 14], 0]
    return float((last - bridge).mean() - (bridge - first).mean())


def estimate_yaw(landmarks: Points) -> float:
    """Return how far a head is turned, from -1 (all the way to one side) to 1, by the share of each cheek."""
    width = (landmarks[[16, 15, 14], 0] - landmarks[0:3, 0]).mean()
    return float(np.clip(asymmetry(landmarks) / width, -1, 1)) if width > 0 else 0.0
