"""Drawn faces of two people who share their expressions, so that the true swap of every face is known.

An expression is head turn, mouth, eyelids, gaze and place; a person is face shape, colours and the distance of the
eyes. The swap of a destination face is the source person drawn with that expression before that background, which
gives swap quality a number. For demonstrations and tests: nothing is claimed about photographs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from pydantic import Field
from torch import Tensor

from mpt.config.options import DatasetOptions
from mpt.seams import Dataset
from mpt.systems.deepfacelab.data.faces.face_pairs import (
    NONE,
    Augmentation,
    FacePairs,
    Faces,
    check_settings,
)

Colour = tuple[float, float, float]


class Settings(DatasetOptions):
    count: int = Field(400, ge=1)
    """Faces of each person to train on."""
    test_count: int = Field(32, ge=1)
    """Faces of each person to test on."""
    random_warp: bool = True
    """Distort the input faces at random; the target stays undistorted."""
    random_transform: bool = True
    """Rotate, scale and shift training faces at random."""
    random_src_flip: bool = False
    """Mirror source faces at random, with probability 0.4."""
    random_dst_flip: bool = False
    """Mirror destination faces at random, with probability 0.4."""


@dataclass(frozen=True)
class Person:
    """Attributes that stay the same from face to face. Sizes are in half sides of the picture."""

    width: float
    height: float
    eye_distance: float
    skin: Colour
    lip: Colour
    iris: Colour
    brow: Colour


SOURCE = Person(
    0.58, 0.78, 0.26, (0.88, 0.68, 0.55), (0.75, 0.25, 0.30), (0.2, 0.5, 0.2), (0.20, 0.15, 0.10)
)
DESTINATION = Person(
    0.68, 0.70, 0.32, (0.62, 0.45, 0.35), (0.55, 0.35, 0.45), (0.15, 0.35, 0.6), (0.45, 0.40, 0.35)
)


@dataclass(frozen=True)
class Expressions:
    """Attributes that change from face to face, each of shape (n 1 1); `background` is (n 3 1 1)."""

    turn: Tensor
    mouth: Tensor
    lids: Tensor
    gaze: Tensor
    right: Tensor
    down: Tensor
    background: Tensor

    def __getitem__(self, indices: Sequence[int]) -> Expressions:
        return Expressions(*(value[list(indices)] for value in vars(self).values()))


def draw_expressions(count: int, seed: int) -> Expressions:
    """Return expressions that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(count, 1, 1, generator=generator) * (high - low) + low

    values = [
        uniform(*limits)
        for limits in ((-0.25, 0.25), (0, 1), (0.25, 1), (-1, 1), (-0.06, 0.06), (-0.06, 0.06))
    ]
    values.append(torch.rand(count, 3, 1, 1, generator=generator) * 0.5 + 0.1)
    return Expressions(*values)


class Canvas:
    """Pictures being painted, and the coordinates of their pixels."""

    def __init__(self, expressions: Expressions, size: int) -> None:
        line = (torch.arange(size) + 0.5) * (2 / size) - 1
        self.x = line - expressions.right
        self.y = line[:, None] - expressions.down
        self.image = expressions.background.expand(-1, 3, size, size)
        self.size = size

    def ellipse(
        self, x: Tensor | float, y: float, width: Tensor | float, height: Tensor | float
    ) -> Tensor:
        """Return the coverage (n h w) of an ellipse, soft over one pixel."""
        radius = (((self.x - x) / width) ** 2 + ((self.y - y) / height) ** 2).sqrt()
        narrow = torch.minimum(torch.as_tensor(width), torch.as_tensor(height))
        return (0.5 - (radius - 1) * narrow * self.size / 4).clamp(0, 1)

    def paint(self, coverage: Tensor, colour: Colour) -> None:
        """Lay a colour over the picture."""
        cover = coverage[:, None]
        self.image = self.image * (1 - cover) + torch.tensor(colour).view(1, 3, 1, 1) * cover


def render(person: Person, expressions: Expressions, size: int) -> Faces:
    """Draw a person with each expression."""
    canvas, turn = Canvas(expressions, size), expressions.turn
    face = canvas.ellipse(0.0, 0.0, person.width, person.height)
    canvas.paint(face, person.skin)
    shade = (1 + canvas.x * turn).clamp(0.6, 1.3)[:, None]
    canvas.image = (canvas.image * (1 + (shade - 1) * face[:, None])).clamp(0, 1)
    features = torch.zeros_like(face)
    for side in (-1, 1):
        middle = side * person.eye_distance + turn * 0.6
        eye = canvas.ellipse(middle, -0.18, 0.13, expressions.lids * 0.10) * face
        canvas.paint(eye, (0.95, 0.95, 0.95))
        canvas.paint(
            canvas.ellipse(middle + expressions.gaze * 0.05, -0.18, 0.055, 0.055) * eye, person.iris
        )
        canvas.paint(canvas.ellipse(middle, -0.36, 0.15, 0.03) * face, person.brow)
        features = features + eye
    red, green, blue = (part * 0.8 for part in person.skin)
    canvas.paint(canvas.ellipse(turn * 0.8, 0.05, 0.05, 0.14) * 0.5, (red, green, blue))
    lips = canvas.ellipse(turn * 0.6, 0.40, 0.22, 0.06 + 0.09 * expressions.mouth)
    canvas.paint(lips, person.lip)
    opening = canvas.ellipse(turn * 0.6, 0.40, 0.15, 0.02 + 0.06 * expressions.mouth)
    canvas.paint(opening * (expressions.mouth > 0.15), (0.1, 0.05, 0.05))
    return Faces(canvas.image, face[:, None], (features + lips).clamp(0, 1)[:, None])


class DrawnIdentity:
    """One person's faces, drawn once."""

    def __init__(self, person: Person, expressions: Expressions, size: int) -> None:
        self.person, self.expressions, self.size = person, expressions, size

    def __len__(self) -> int:
        return len(self.expressions.turn)

    @cached_property
    def all_faces(self) -> Faces:
        chunks = [
            render(
                self.person, self.expressions[range(start, min(start + 50, len(self)))], self.size
            )
            for start in range(0, len(self), 50)
        ]
        return Faces(*(torch.cat(parts) for parts in zip(*chunks)))

    def faces(self, indices: Sequence[int]) -> Faces:
        if len(self) * self.size**2 > 2**25:  # too many pixels to keep: draw the requested ones
            return render(self.person, self.expressions[indices], self.size)
        return Faces(*(part[list(indices)] for part in self.all_faces))

    def picture(self, index: int) -> Tensor:
        return self.faces([index]).image[0]


def build(settings: Settings, split: str, seed: int) -> Dataset:
    """Draw both people. Expressions do not depend on the run's seed, so that runs are measured on the same faces."""
    check_settings(settings.channels, settings.augment)
    size = settings.image_size or 64
    train = split == "train"
    count = settings.count if train else settings.test_count
    src = DrawnIdentity(SOURCE, draw_expressions(count, 1 if train else 11), size)
    dst_expressions = draw_expressions(count, 2 if train else 12)
    dst = DrawnIdentity(DESTINATION, dst_expressions, size)
    extra = {"random_warp": settings.random_warp}
    if not train:
        return FacePairs(
            src,
            dst,
            size,
            seed,
            NONE,
            swaps=DrawnIdentity(SOURCE, dst_expressions, size),
            extra=extra,
        )
    flips = (0.4 if settings.random_src_flip else 0.0, 0.4 if settings.random_dst_flip else 0.0)
    augmentation = Augmentation(settings.random_warp, settings.random_transform, *flips)
    return FacePairs(src, dst, size, seed, augmentation, swaps=None, extra=extra)
