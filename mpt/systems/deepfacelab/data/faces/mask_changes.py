"""How faces are changed while XSeg trains: backgrounds of other faces, bends, flares, colours, blurs, JPEG.

The chances and ranges are DeepFaceLab's, and OpenCV does them as there. Pictures are float32 (s, s, 3), B, G, R; masks
are (s, s). All that is random comes from one generator per sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpt.systems.deepfacelab.data.faces.face_warp import NUMBERS, Reach, Warps, bend_map, draw_warps
from mpt.systems.deepfacelab.data.faces.opencv import opencv

Picture = np.ndarray[Any, np.dtype[Any]]
Numbers = np.random.Generator

FACE = Reach(math.radians(10), 1.05, 0.05)
BACKGROUND = Reach(math.radians(180), 1.10, 0.10)
FLIP_CHANCE = 0.4
FILTER_CHANCE = 0.25
BOX_AMOUNT, GAUSSIAN_AMOUNT = 10, 50
"""Amounts of sharpening are below these."""
LARGEST_KERNEL = 5
SMALLEST_SHARE = 0.25
"""To which share of its sides a picture is shrunk at most before it is enlarged again."""
LEAST_OF_BACKGROUND = 0.15
LEVELS = 0.25
"""How far black and white points are moved at most."""
WORST_JPEG = 10


@dataclass(frozen=True)
class Labelled:
    """A face and its mask."""

    picture: Picture
    mask: Picture


def change(face: Labelled, other: Labelled | None, numbers: Numbers) -> Labelled:
    """Return a face as it is trained on. `other` is a face whose surroundings are blended into this one's."""
    picture, mask = face.picture, face.mask
    if other is not None:
        picture = blend_background(picture, mask, other, numbers)
    picture, mask = move(Labelled(picture, mask), numbers, FACE, bends=True)
    picture, mask = picture.clip(0, 1), (mask >= 0.5).astype(np.float32)
    for part in (mask, 1 - mask):
        if numbers.random() < 0.5:
            picture = picture + glow(picture * part[..., None], numbers)
    shift = shift_colours if numbers.random() < 0.5 else shift_levels
    picture = within_circle(picture, shift(picture, numbers), numbers)
    picture = filtered(picture, numbers)
    picture = compress(picture.clip(0, 1), numbers)
    return Labelled(np.ascontiguousarray(picture, np.float32), mask)


def draw_background(numbers: Numbers) -> bool:
    """Decide whether a sample gets another's surroundings."""
    return bool(numbers.random() < 0.5)


def blend_background(picture: Picture, mask: Picture, other: Labelled, numbers: Numbers) -> Picture:
    """Return the picture with another's surroundings, turned any way and recoloured, over its own.

    Both faces are left out: at the pixels of either, the picture stays.
    """
    around, covered = move(other, numbers, BACKGROUND, bends=False)
    around = around * (1 - covered[..., None])
    around = (shift_colours if numbers.random() < 0.5 else shift_levels)(around, numbers)
    kept = (1 - (1 - covered) * (1 - mask))[..., None]
    own = LEAST_OF_BACKGROUND + numbers.random() * (1 - LEAST_OF_BACKGROUND)
    return np.asarray(
        picture * kept + (picture * own + around * (1 - own)) * (1 - kept), np.float32
    )


def move(face: Labelled, numbers: Numbers, reach: Reach, bends: bool) -> tuple[Picture, Picture]:
    """Return picture and mask after one random affine map, before which both are bent if `bends` is set."""
    size = len(face.mask)
    warps = draw_warps(
        torch.from_numpy(numbers.random((1, NUMBERS))), size, True, FLIP_CHANCE, reach
    )
    picture = move_one(face.picture, warps, bends, repeats_edge=True)
    return picture, move_one(face.mask, warps, bends, repeats_edge=False)


def move_one(image: Picture, warps: Warps, bends: bool, repeats_edge: bool) -> Picture:
    """Return an image displaced by the first of the maps."""
    cv2, size = opencv(), len(image)
    if bends:
        x, y = bend_map(warps.offsets, size)[0].numpy()
        image = cv2.remap(image, x, y, cv2.INTER_CUBIC)
    border = cv2.BORDER_REPLICATE if repeats_edge else cv2.BORDER_CONSTANT
    flags = cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP
    image = cv2.warpAffine(
        image, warps.affine[0].double().numpy(), (size, size), flags=flags, borderMode=border
    )
    return np.asarray(image[:, ::-1] if warps.flipped[0] else image)


def glow(part: Picture, numbers: Numbers) -> Picture:
    """Return the light of a part of the picture, spread over a quarter of its side or more."""
    size = len(part)
    width = int(numbers.integers(size // 4, size)) // 2 * 2 + 1
    return np.asarray(opencv().GaussianBlur(part, (width, width), 0))


def shift_colours(picture: Picture, numbers: Numbers) -> Picture:
    """Return a picture with any hue, and with saturation and value moved by up to a half."""
    cv2 = opencv()
    hue, saturation, value = cv2.split(
        cv2.cvtColor(np.asarray(picture, np.float32), cv2.COLOR_BGR2HSV)
    )
    hue = (hue + numbers.integers(360)) % 360
    saturation, value = ((part + numbers.random() - 0.5).clip(0, 1) for part in (saturation, value))
    moved = cv2.merge([part.astype(np.float32) for part in (hue, saturation, value)])
    return np.asarray(cv2.cvtColor(moved, cv2.COLOR_HSV2BGR)).clip(0, 1)


def shift_levels(picture: Picture, numbers: Numbers) -> Picture:
    """Return a picture with other black points, white points and gammas per channel, before and after."""
    black, white = numbers.random(3) * LEVELS, 1 - numbers.random(3) * LEVELS
    gamma = 0.5 + numbers.random(3)
    lowest, highest = numbers.random(3) * LEVELS, 1 - numbers.random(3) * LEVELS
    stretched = ((picture - black) / (white - black)).clip(0, 1)
    return np.asarray(
        (stretched ** (1 / gamma) * (highest - lowest) + lowest).clip(0, 1), np.float32
    )


def filtered(picture: Picture, numbers: Numbers) -> Picture:
    """Return a picture that may be sharpened or blurred, and coarser, each within a circle of its own."""
    if numbers.random() < 0.5:
        if numbers.random() < FILTER_CHANCE:
            picture = within_circle(picture, sharpened(picture, numbers), numbers)
    else:
        for blurred in (blurred_along, blurred_round):
            if numbers.random() < FILTER_CHANCE:
                picture = within_circle(picture, blurred(picture, numbers), numbers)
    if numbers.random() < FILTER_CHANCE:
        picture = within_circle(picture, coarser(picture, numbers), numbers)
    return picture


def sharpened(picture: Picture, numbers: Numbers) -> Picture:
    """Return a sharpened picture, by a box or by a Gaussian of up to 5 pixels."""
    cv2 = opencv()
    width = int(numbers.integers(1, LARGEST_KERNEL + 1)) | 1
    if numbers.random() < 0.5:
        amount, blurred = float(numbers.integers(BOX_AMOUNT)), cv2.blur(picture, (width, width))
    else:
        amount, blurred = (
            numbers.integers(GAUSSIAN_AMOUNT) / 2,
            cv2.GaussianBlur(picture, (width, width), 0),
        )
    return np.asarray(picture + amount * (picture - blurred), np.float32)


def blurred_along(picture: Picture, numbers: Numbers) -> Picture:
    """Return a picture blurred along a line of up to 5 pixels."""
    cv2, size = opencv(), int(numbers.integers(1, LARGEST_KERNEL + 1))
    line = np.zeros((size, size), np.float32)
    line[(size - 1) // 2] = 1
    turn = cv2.getRotationMatrix2D(
        (size / 2 - 0.5, size / 2 - 0.5), float(numbers.integers(360)), 1.0
    )
    line = cv2.warpAffine(line, turn, (size, size))
    return np.asarray(cv2.filter2D(picture, -1, line / line.sum()))


def blurred_round(picture: Picture, numbers: Numbers) -> Picture:
    """Return a picture blurred by a Gaussian of up to 9 pixels."""
    width = int(numbers.integers(LARGEST_KERNEL)) * 2 + 1
    return np.asarray(opencv().GaussianBlur(picture, (width, width), 0))


def coarser(picture: Picture, numbers: Numbers) -> Picture:
    """Return a picture after it was shrunk and enlarged again."""
    cv2, size = opencv(), len(picture)
    small = size - int(numbers.random() * int(size * (1 - SMALLEST_SHARE)))
    way = cv2.INTER_NEAREST if numbers.random() < 0.5 else cv2.INTER_LINEAR
    return np.asarray(
        cv2.resize(
            cv2.resize(picture, (small, small), interpolation=way), (size, size), interpolation=way
        )
    )


def compress(picture: Picture, numbers: Numbers) -> Picture:
    """Return a picture that may have been a JPG, of any quality from 10 on, within a circle."""
    if numbers.random() >= FILTER_CHANCE:
        return picture
    cv2, quality = opencv(), int(numbers.integers(WORST_JPEG, 101))
    _, data = cv2.imencode(
        ".jpg", (picture * 255).astype(np.uint8), [int(cv2.IMWRITE_JPEG_QUALITY), quality]
    )
    decoded = cv2.imdecode(data, cv2.IMREAD_COLOR).astype(np.float32) / 255
    return within_circle(picture, decoded, numbers)


def within_circle(picture: Picture, changed: Picture, numbers: Numbers) -> Picture:
    """Return a picture with its changed form laid over it inside of a random circle that fades outwards."""
    size = len(picture)
    start = int(numbers.integers(size))
    fade = max(1, start + int(numbers.integers(size - start)))
    row, column = numbers.integers(size, size=2)
    line = np.arange(size, dtype=np.float32)
    distance = np.hypot(line[:, None] - row, line - column)
    share = (1 - (distance - start) / fade).clip(0, 1)[..., None]
    return np.asarray(picture * (1 - share) + changed * share, np.float32)
