"""The pieces of an update that the step, the diagnosis and the dry runs of memory tricks share: inputs and losses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from mpt.errors import ConfigError
from mpt.seams import NOTHING, Batch, Loss, MemoryTrick, Phase, Run


def draw_batch(run: Run, phase: Phase, batch: Batch) -> Batch:
    """Return a whole batch with what an update adds to it before it is split: random inputs, normalisers."""
    batch = run.task.draw(batch, phase)
    return batch if phase.prepare is None else phase.prepare(batch)


END = object()
"""What stands for the end of a phase's losses: a phase may yield anything by mistake."""


def losses_of(run: Run, phase: Phase, part: Batch) -> Iterator[Loss]:
    """Yield a phase's losses on a micro-batch: the only place where they are computed.

    What a phase yields is computed when it is asked for. Drop a loss before asking for the next, or its graph stays in
    memory beside the next one's. Raises ConfigError where a phase yields something else.
    """
    with forward_of(run):
        made = phase.losses(part)
        pending: Iterator[Any] = iter(made)
        loss: Any = next(pending, END)
    while loss is not END:
        if not isinstance(loss, Loss):
            raise ConfigError(
                f"phase {phase.name}: its losses yielded {type(loss).__name__}, not a Loss(name, value). "
                "What has nothing to train at this step yields nothing"
            )
        yield loss
        del loss
        if isinstance(made, tuple):  # all computed by now: the contexts need not be entered again
            loss = next(pending, END)
            continue
        with forward_of(run):
            loss = next(pending, END)


def forward_of(run: Run) -> AbstractContextManager[Any]:
    """Return what one forward is computed in, the precision mode's context and the tricks', as one."""
    if not run.tricks:
        return arithmetic_of(run)
    return entered([arithmetic_of(run), *(trick.forward() for trick in run.tricks)])


def arithmetic_of(run: Run) -> AbstractContextManager[Any]:
    """Return what any forward is computed in, in training or not: the precision mode's context and stable forms."""
    own = run.precision.forward()
    return own if run.stable_forms is NOTHING else entered([own, run.stable_forms])


def memory_forward(tricks: Sequence[MemoryTrick]) -> AbstractContextManager[Any]:
    """Return the tricks' contexts of one forward as one."""
    return entered([trick.forward() for trick in tricks])


def entered(contexts: Iterable[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Return several contexts as one."""
    chosen = [context for context in contexts if context is not NOTHING]
    if not chosen:
        return NOTHING
    stack = ExitStack()
    for context in chosen:
        stack.enter_context(context)
    return stack
