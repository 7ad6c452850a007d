"""The pieces of an update that the step, the diagnosis and the dry runs of memory tricks share: inputs and losses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from mpt.errors import ConfigError
from mpt.seams import NOTHING, Batch, Loss, Phase, Run
from mpt.seams.logged import Figures


def draw_batch(run: Run, phase: Phase, batch: Batch) -> Batch:
    """Return a whole batch with an update's additions before it is split: random inputs, normalisers."""
    batch = run.task.draw(batch, phase)
    return batch if phase.prepare is None else phase.prepare(batch)


SEVERAL = (tuple, list)
"""Losses of one backward."""
END = object()
"""The mark of the end of a phase's losses: a phase may yield anything by mistake."""


def losses_of(
    run: Run, phase: Phase, part: Batch, figures: Figures | None = None
) -> Iterator[tuple[Loss, ...]]:
    """Yield a phase's losses on a micro-batch, those of one backward together: the only place that computes them.

    A phase's loss is computed when it is asked for. Drop losses before asking for the next, or their graph stays
    in memory alongside the next one's. `figures` takes values logged meanwhile. Raises ConfigError if a phase yields
    something else.
    """
    with forward_of(run):
        Figures.open = figures
        try:
            made: Any = phase.losses(part)
            is_one = not isinstance(
                made, Iterator
            )  # a Loss or several, which are tuples, or a mistake
            pending: Iterator[Any] = iter(() if is_one else made)
            item: Any = made if is_one else next(pending, END)
        finally:
            Figures.open = None
    del made
    while item is not END:
        together = as_together(item, phase)
        del item
        if together:
            yield together
        del together
        if is_one:
            return
        with forward_of(run):
            Figures.open = figures
            try:
                item = next(pending, END)
            finally:
                Figures.open = None


def as_together(item: Any, phase: Phase) -> tuple[Loss, ...]:
    """Check a phase's yielded losses of one backward. Raises ConfigError for anything else."""
    together = (item,) if isinstance(item, Loss) or not isinstance(item, SEVERAL) else tuple(item)
    for loss in together:
        if not isinstance(loss, Loss):
            raise ConfigError(
                f"phase {phase.name}: its losses yielded {type(loss).__name__}, not a Loss(name, value) or a tuple of "
                "them. A phase with nothing to train at this step yields nothing"
            )
        if phase.normalised and loss.weight is None:
            raise ConfigError(
                f"phase {phase.name}: loss {loss.name!r} has no weight; a phase that is normalised yields losses with "
                "the part's share of the normaliser, Loss(name, sum, 'sum', weight)"
            )
    return together


def forward_of(run: Run) -> AbstractContextManager[Any]:
    """Return the context of one forward: the precision mode's and the tricks', as one."""
    if not run.tricks:
        return arithmetic_of(run)
    return entered([arithmetic_of(run), *(trick.forward() for trick in run.tricks)])


def arithmetic_of(run: Run) -> AbstractContextManager[Any]:
    """Return the context of any forward, in training or not: the precision mode's and stable forms."""
    own = run.precision.forward()
    return own if run.stable_forms is NOTHING else entered([own, run.stable_forms])


def entered(contexts: Iterable[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Return several contexts as one."""
    chosen = [context for context in contexts if context is not NOTHING]
    if not chosen:
        return NOTHING
    stack = ExitStack()
    for context in chosen:
        stack.enter_context(context)
    return stack
