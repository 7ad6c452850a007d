"""Figures of dry runs, remembered for configurations that differ in nothing that is measured.

A search for recipes plans one network with many budgets of `memory.recompute`, each of which would measure the same
blocks. Only a planning process remembers (`remembering`), and of one process alone: a training measures once. What a
forward may draw from Python's, numpy's and torch's random generators counts as drawn when its figures are remembered.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy
import torch

from mpt.seams import Run

Figures = TypeVar("Figures")
MOST = 12
"""Dry runs that are remembered; the oldest are forgotten."""

_subject: ContextVar[str | None] = ContextVar("subject of remembered dry runs", default=None)
_figures: dict[str, tuple[Any, tuple[Any, Any, Any]]] = {}


@contextmanager
def remembering(subject: str) -> Iterator[None]:
    """Remember dry runs inside the block; `subject` is what they depend on besides the configuration."""
    token = _subject.set(subject)
    try:
        yield
    finally:
        _subject.reset(token)


def remembered(run: Run, what: str, measure: Callable[[], Figures]) -> Figures:
    """Return the figures of a dry run for `memory.recompute`, measured now unless they are remembered.

    `what` distinguishes those of one configuration. They must not hold the run's own objects.
    """
    subject = _subject.get()
    if subject is None or run.world.size > 1:
        return measure()
    settings = run.config.to_data()
    del settings["memory"]["recompute"]
    key = json.dumps([subject, what, settings], sort_keys=True)
    if key in _figures:
        figures, (of_python, of_numpy, of_torch) = _figures[key]
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        torch.default_generator.set_state(of_torch)
        return figures  # type: ignore[no-any-return]
    found = measure()
    if len(_figures) == MOST:
        del _figures[next(iter(_figures))]
    states = random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()
    _figures[key] = found, states
    return found
