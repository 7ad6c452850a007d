"""The numbers that a step draws from the generators of Python, NumPy and torch.

Some steps hold more or less by a draw: how many layers of a quantizer are left out, which augmentation is applied. Each
trace of a training begins with the generators in one state, so that a change to it is compared with the same draws.
What a loader draws for its batches is no reason to try others, unless these have several forms: sentences are padded to
the longest of those that are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import numpy
import torch
from torch import Tensor

_aten = torch.ops.aten
DRAWN: Mapping[Any, Callable[[Any], float | None]] = {
    **dict.fromkeys((_aten.randint.default, _aten.randint.generator), lambda args: args[0] - 1),
    **dict.fromkeys((_aten.randint.low, _aten.randint.low_generator), lambda args: args[1] - 1),
    _aten.random_.to: lambda args: args[1] - 1,
    getattr(_aten.random_, "from"): lambda args: None if args[2] is None else args[2] - 1,
    _aten.uniform_.default: lambda args: below(*args[:3]),
}
"""Operator that draws a number -> the most that it can be, of its arguments: a size that is drawn, or a place."""
SEEDING = (
    (random, "seed"),
    (numpy.random, "seed"),
    (torch, "manual_seed"),
    (torch.random, "manual_seed"),
)
"""Functions by which a script seeds the generators that are not its own."""


def below(tensor: Tensor, start: float = 0.0, end: float = 1.0) -> float:
    """Return a number just below the end of an interval, which is no part of it."""
    return start + (end - start) * (1 - torch.finfo(tensor.dtype).eps)


def _states() -> tuple[Any, ...]:
    name, keys, place, *_ = cast(Any, numpy.random.get_state())
    return random.getstate(), name, keys[0], place


class Draws:
    """Whether a step draws from the generators of Python or NumPy, outside of its loaders."""

    def __init__(self) -> None:
        self.is_found = False
        self.forms: set[tuple[tuple[int, ...], ...]] = set()
        """Shapes of the tensors of loaded batches."""
        self._before: Any = None

    def begin(self) -> None:
        """Take no notice of what was drawn before."""
        self._before = _states()

    def look(self) -> None:
        """Notice whether something was drawn since."""
        self.is_found |= self._before is not None and self._before != _states()


@contextmanager
def seeded_otherwise(seed: int) -> Iterator[None]:
    """Let a script that seeds the generators draw others inside the block, unless the seed is 0."""

    def other(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(given: Any = None, *others: Any, **named: Any) -> Any:
            is_number = isinstance(given, (int, numpy.integer))
            return function((int(given) + seed) % 2**32 if is_number else given, *others, **named)

        return call

    with ExitStack() as stack:
        for owner, name in SEEDING if seed else ():
            stack.enter_context(mock.patch.object(owner, name, other(getattr(owner, name))))
        yield


@contextmanager
def drawn_from(seed: int, with_torch: bool) -> Iterator[None]:
    """Draw the numbers of a seed inside the block, and leave the generators as they were.

    `with_torch`: torch's too, from which a plan draws only where values are trusted.
    """
    before = random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    numpy.random.seed(seed)
    if with_torch:
        torch.default_generator.manual_seed(seed)
    try:
        with seeded_otherwise(seed):
            yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        if with_torch:
            torch.default_generator.set_state(before[2])
