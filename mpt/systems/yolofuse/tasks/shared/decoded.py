"""Outputs of an exported detector: boxes and scores, decoded inside, in one of four layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DETECTION = 7
"""Numbers of a row of a file with suppression inside: sample, corners, score, class."""

ROW = 6
"""Numbers of a detection of a head that needs no suppression; no picture has so few places."""


class Decoded(NamedTuple):
    """Boxes (b, p, 4) as left, top, right, bottom in pixels, and scores (b, p, classes)."""

    boxes: Tensor
    scores: Tensor


def decoded_outputs(made: Sequence[Tensor], samples: int = 0, classes: int = 0) -> Decoded:
    """Decode a file's outputs.

    Two are corners (b, p, 4) and scores (b, classes, p). One of three dimensions is that of Ultralytics' exports: (b,
    4 + classes, p), centre, width, height and scores, or, of a head that needs no suppression, rows (b, n, 6) of
    corners, score and class. One of rows (n, 7) are the boxes that suppression kept, of a batch of `samples` and a
    number of `classes`.
    """
    if len(made) == 2:
        return Decoded(made[0], made[1].transpose(1, 2))
    only = made[0]
    if only.dim() == 3 and only.shape[2] == ROW:
        kinds = torch.nn.functional.one_hot(only[..., 5].long(), max(1, classes))
        return Decoded(only[..., :4], only[..., 4:5] * kinds)
    if only.dim() == 3:
        middle, size, scores = torch.split(only.transpose(1, 2), [2, 2, only.shape[1] - 4], 2)
        return Decoded(torch.cat((middle - size / 2, middle + size / 2), 2), scores)
    assert only.shape[1] == DETECTION
    own = [only[only[:, 0] == sample] for sample in range(samples)]
    places = max(1, *(len(rows) for rows in own))
    boxes, scores = only.new_zeros(samples, places, 4), only.new_zeros(samples, places, classes)
    for sample, rows in enumerate(own):
        boxes[sample, : len(rows)] = rows[:, 1:5]
        scores[sample, range(len(rows)), rows[:, 6].long()] = rows[:, 5]
    return Decoded(boxes, scores)
