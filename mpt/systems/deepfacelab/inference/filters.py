"""Filters of DeepFaceLab's merger on whole pictures: sharpening, medians, motion blur, and making a frame worse.

Pictures are float32 in [0, 1], B, G, R.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from PIL import Image

from mpt.systems.deepfacelab.data.faces.colour_transfer import Picture
from mpt.systems.deepfacelab.data.faces.opencv import opencv

Sharpening = Literal["none", "box", "gaussian"]


PALETTE = 256


def to_levels(picture: Picture) -> Picture:
    """Return grey levels, cut off as DeepFaceLab's, uint8."""
    return np.asarray((picture.clip(0, 1) * 255).astype(np.uint8))


def blur_along(image: Picture, size: int, degrees: float) -> Picture:
    """Return an image blurred along a line of `size` pixels."""
    cv2 = opencv()
    line = np.zeros((size, size), np.float32)
    line[(size - 1) // 2] = 1
    middle = size / 2 - 0.5
    line = cv2.warpAffine(
        line, cv2.getRotationMatrix2D((middle, middle), degrees, 1.0), (size, size)
    )
    return np.asarray(cv2.filter2D(image, -1, line / line.sum()))


def sharpen(image: Picture, mode: Sharpening, amount: int) -> Picture:
    """Return an image with its difference from its blur over 3 pixels added, or, for a negative amount, smoothed."""
    cv2 = opencv()
    if amount < 0:
        return smooth(image, -amount * 10, 100)
    if mode == "box":
        point = np.zeros((3, 3), np.float32)
        point[1, 1] = 1
        return np.asarray(cv2.filter2D(image, -1, point + (point - np.float32(1 / 9)) * amount))
    if mode == "gaussian":
        blurred = cv2.GaussianBlur(image, (3, 3), 0)
        return np.asarray(cv2.addWeighted(image, 1 + 0.5 * amount, blurred, -0.5 * amount, 0))
    return image


def smooth(image: Picture, percent: int, less: int) -> Picture:
    """Return an image after medians of 5 x 5, the first at `percent` and each next at `less` percent less."""
    while percent > 0:
        share = min(percent / 100, 1.0)
        image = (image * (1 - share) + opencv().medianBlur(image, 5) * share).astype(np.float32)
        percent -= less
    return image


def degrade(frame: Picture, denoise: int, shrink: int) -> Picture:
    """Return a frame after medians of a strength in percent, shrunk by percent and enlarged again."""
    cv2 = opencv()
    if denoise:
        frame = smooth(frame, denoise, 10)
    if shrink:
        share = 1 - shrink / 101
        height, width = frame.shape[:2]
        size = (max(1, int(width * share)), max(1, int(height * share)))
        frame = cv2.resize(frame, size, interpolation=cv2.INTER_CUBIC)
        frame = cv2.resize(frame, (width, height), interpolation=cv2.INTER_CUBIC)
    return frame


def reduce_colours(image: Picture) -> Picture:
    """Return an image in the 256 colours that fit it best."""
    picture = Image.fromarray(to_levels(image)[..., ::-1])
    few = picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=PALETTE).convert("RGB")
    return np.asarray(few, np.float32)[..., ::-1] / 255
