"""Frames that repeat the one before: 12 pictures a second in a file of 24, or a capture that dropped some.

Two frames are one picture if in no block of 16 x 16 pixels they differ by more than a fraction of a grey level, and
what a motion by a fraction of a pixel would change there: an encoder's noise is larger if there is more detail.
A repeat says nothing about motion: the frames around it are interpolated over it. A picture that is repeated more
often than `MOST_HELD` times is meant to stand still.

Misses and false alarms: docs/benchmarks/scene_cuts.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Item = TypeVar("Item")

BLOCK = 16
NOISE = 0.3 / 255
"""Mean difference of a block that is noise, whatever it shows."""
MOTION = 0.15
"""Pixels of motion that are none: this share of the mean step from a pixel to the next is noise as well."""
MOST_HELD = 3


@dataclass(frozen=True)
class Distinct(Generic[Item]):
    """A frame, and the repeats of it that are interpolated over; `still` if the next frame shows the same picture."""

    frame: Item
    repeats: tuple[Item, ...] = ()
    still: bool = False


def is_repeat(one_chw: Tensor, other_chw: Tensor) -> bool:
    """Do two frames, uint8 or int32 up to 65535, show the same picture?"""
    most = 255 if one_chw.dtype == torch.uint8 else 65535
    one, other = (
        image.float().mean(0, keepdim=True)[None] / most for image in (one_chw, other_chw)
    )
    difference = blocks((one - other).abs())
    steps = blocks(F.pad((one[..., 1:] - one[..., :-1]).abs(), (0, 1)))
    return bool((difference <= NOISE + MOTION * steps).all())


def blocks(image_bchw: Tensor) -> Tensor:
    """Return the means over blocks; those at the edge are smaller."""
    side = min(BLOCK, *image_bchw.shape[-2:])
    return F.avg_pool2d(image_bchw, side, ceil_mode=True, count_include_pad=False)


def distinct_frames(
    frames: Iterator[Item], same: Callable[[Item, Item], bool], cut: Callable[[Item, Item], bool]
) -> Iterator[Distinct[Item]]:
    """Yield frames without the repeats that are to be interpolated over.

    Before a cut, at the end, and where a picture is held for long, repeats stay frames of their own.
    """
    run: list[Item] = []
    is_long = False
    for frame in frames:
        if run and same(run[0], frame):
            run.append(frame)
            if len(run) > MOST_HELD + 1:
                is_long = True
                yield Distinct(run.pop(0), still=True)
            continue
        yield from ended(run, is_long or bool(run and cut(run[-1], frame)))
        run, is_long = [frame], False
    yield from ended(run, held=True)


def ended(run: list[Item], held: bool) -> Iterator[Distinct[Item]]:
    """Yield a run of frames of one picture: each for itself, or the first with the rest as its repeats."""
    if run and not held:
        yield Distinct(run[0], tuple(run[1:]))
        return
    for number, frame in enumerate(run):
        yield Distinct(frame, still=number < len(run) - 1)
