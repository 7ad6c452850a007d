"""Detections for people: drawn onto the cameras' pictures side by side, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

COLOURS = (
    (255, 214, 0),
    (0, 229, 255),
    (255, 64, 129),
    (118, 255, 3),
    (255, 145, 0),
    (124, 77, 255),
)
LEAST_WIDTH = 192
"""Smaller pictures are enlarged, or the text would cover them."""


def draw_pair(
    cameras: Sequence[Tensor], rows: np.ndarray[Any, Any], classes: Sequence[str]
) -> Tensor:
    """Return (3, h, w of all cameras) in [0, 1] from pictures (c, h, w) in [0, 1] and rows (corners, score, class)."""
    drawn = []
    for picture in cameras:
        pixels = (
            (picture.float().clamp(0, 1) * 255).round().byte().expand(3, -1, -1).permute(1, 2, 0)
        )
        image = Image.fromarray(pixels.contiguous().numpy())
        drawn.append(np.asarray(draw_boxes(image, rows, classes)))
    return torch.from_numpy(np.concatenate(drawn, 1)).permute(2, 0, 1).float() / 255


def draw_boxes(
    image: Image.Image, rows: np.ndarray[Any, Any], classes: Sequence[str]
) -> Image.Image:
    """Return a picture with boxes (corners in its pixels, score, class), enlarged if it is small."""
    factor = max(1, -(-LEAST_WIDTH // image.width))
    image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(image)
    width = max(1, image.width // 320)
    for left, top, right, bottom, score, kind in rows[rows[:, 4].argsort()].tolist():
        colour = COLOURS[int(kind) % len(COLOURS)]
        corners = [side * factor for side in (left, top, max(left, right), max(top, bottom))]
        pen.rectangle(corners, outline=colour, width=width)
        label = f"{classes[int(kind)]} {score:.2f}"
        box = pen.textbbox((corners[0], corners[1]), label)
        height = box[3] - box[1] + 2
        y = corners[1] - height if corners[1] >= height else corners[1]
        wide = box[2] - box[0] + 2
        # near the right edge the text begins further left
        x = max(0, min(corners[0], image.width - wide))
        pen.rectangle((x, y, x + wide, y + height), fill=colour)
        pen.text((x + 1, y - (box[1] - corners[1]) + 1), label, fill=(0, 0, 0))
    return image


def in_words(rows: np.ndarray[Any, Any], classes: Sequence[str]) -> str:
    """Return detections as text: `person 0.93 12 30 44 96; ...` with corners in pixels."""
    return "; ".join(
        f"{classes[int(kind)]} {score:.2f} {left:.0f} {top:.0f} {right:.0f} {bottom:.0f}"
        for left, top, right, bottom, score, kind in rows.tolist()
    )
