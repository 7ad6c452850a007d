"""Frames at several times by a network that makes only the middle one: halves of halves.

The frame at 1/4 is the middle of the first frame and the middle frame. Times that are no multiple of 1/32 are taken at
the nearest one, as the programs of RIFE do within their own tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from torch import Tensor

FINEST = 32


def by_halving(
    middle: Callable[[Tensor, Tensor], Tensor],
    first: Tensor,
    last: Tensor,
    moments: Sequence[Fraction],
) -> list[Tensor]:
    """Return the frames at times between 0 and 1; `middle` makes the one between two."""
    known = {Fraction(0): first, Fraction(1): last}

    def frame_at(moment: Fraction) -> Tensor:
        if moment not in known:
            step = Fraction(1, moment.denominator)
            known[moment] = middle(frame_at(moment - step), frame_at(moment + step))
        return known[moment]

    return [frame_at(Fraction(round(moment * FINEST), FINEST)) for moment in moments]
