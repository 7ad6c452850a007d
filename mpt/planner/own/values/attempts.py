"""Traces of one training with other answers to its reads of values, of which the one that holds the most is planned.

Values are bounds or zeros first (`mpt.planner.own.values.bounds`). They are those that are loaded and drawn where
bounds lead nowhere, where integers are read, which may become sizes, and where bounds are far above what the data need.
Where a draw may decide what a step holds, a few others are drawn. Where a step asks if a mask has places, it has none
first and then some. Where a value says how often a loop goes round, or nothing else leads to an end, all values are
computed on the host, as long as that takes no longer than a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from mpt.config.sizes import describe_bytes
from mpt.errors import MptError
from mpt.planner.own.stand_ins.extensions import KernelNotCompiled, extensions_forgotten
from mpt.planner.own.values.bounds import BoundedShapes, follows_from_value
from mpt.planner.own.values.value_loops import GOES_ROUND, EndlessLoop
from mpt.planner.trace.cannot_plan import CannotPlan
from mpt.planner.trace.trace import Trace, live_peak

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds of the processor, which are the same on a busy machine, that a trace may take to be followed by another one
that only may hold more."""
DRAW_PATIENCE = 15.0
"""The same where only a draw differs."""
ALIKE = 0.98
"""Share of the largest from which on draws are taken to make no difference."""
WEIGHS = 0.00002
"""Share of a step's memory from which on a result at its bound may decide how much that is: of a picture's patches that
are kept, 40 layers hold some thousand times as much."""
NEAR = 1.05
"""A plan with all sizes at their bounds is taken as it is if it holds no more than that times one with its data's."""
SEEDS = (1, 2, 3)
"""Of the further draws."""


@dataclass(frozen=True)
class Answers:
    """How the reads of values are answered in a trace."""

    trusts_data: bool = False
    """Values that it loads and draws are taken for true."""
    seed: int = 0
    finds: bool = False
    """Masks have places if it asks."""
    has_compiler: bool = True
    """Kernels that it compiles are there, and refused when they are called."""
    shares: bool = False
    """Masks that share places out are even."""
    computes_for: float = 0.0
    """Seconds that all values may take to be computed; 0 if they are not."""
    waits: bool = False
    """Loops are waited for that seem to have no end."""


AS_BOUNDS = Answers()
COMPUTING = Answers(trusts_data=True, computes_for=45.0)
BRIEFLY = replace(COMPUTING, computes_for=10.0)
ALL_COMPUTED = (
    "all values were computed on the host, {}: where they change, a step may need more than planned"
)
INTEGERS = "since integers that it reads follow from them"
NO_OTHER = "since the step cannot be planned without them"
WITHOUT_KERNELS = "kernels that it compiles are not in this plan: it is planned as where there is no compiler of CUDA"
LARGEST_DRAW = "The largest is planned; another draw may need more"
FEW_BATCHES = "its batches have several forms, and there was no time for another order: longer ones may need more"
AT_BOUNDS = "Planned is a step with each size as large as it can be"
LARGER = "with each size as large as it can be, the tensors would need {}"
OF_DATA = (
    f"sizes that follow from data are those of the batches that were loaded or drawn here; {LARGER}"
)


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """A trace, and what it asked for."""

    found: T
    trace: Trace
    answers: Answers
    reads_integers: bool = False
    """Integers were read that are not known."""
    draws: bool = False
    """Python's or NumPy's generator was drawn from, outside of loaders."""
    reads_draws: bool = False
    """Integers that torch drew were read, or batches of several forms loaded, of which others may be drawn."""
    batches_differ: bool = False
    """Batches of several forms were loaded."""
    is_bounded: bool = False
    """A size at its bound may weigh."""
    follows_data: bool = False
    """Sizes are those of the data that it loads or draws."""
    evens_counts: bool = False
    """Counts were taken to be even and read, which are those of its data perhaps."""
    shares_out: bool = False
    """Masks that share places out were asked for."""
    is_partial: bool = False
    """Not all of these masks were, so that those may be larger than even."""
    asks_masks: bool = False
    """It asked whether masks have places, and went on as if they had none."""
    has_hurried: bool = False
    """Sizes of large data are at their bounds, since their values took too long to compute."""
    loop: str = ""
    """The line of a loop that goes on as long as a value says which is not known."""

    @classmethod
    def of(
        cls, found: T, trace: Trace, answers: Answers, values: BoundedShapes | None
    ) -> Attempt[T]:
        """Return an attempt with the questions that it asked of `values`."""
        if values is None:
            return cls(found, trace, answers)
        return cls(
            found,
            trace,
            answers,
            values.integers > 0,
            values.drawn.is_found,
            values.drawn_reads > 0 or len(values.drawn.forms) > 1,
            len(values.drawn.forms) > 1,
            values.bounded.are_listed or values.bounded.largest_bytes > WEIGHS * live_peak(trace),
            values.follows_data,
            values.totals.may_be_read,
            values.shared.are_asked,
            not values.shared.are_whole,
            values.asked.missed > 0,
            values.values.has_hurried,
            values.loops.first,
        )

    @property
    def peak(self) -> int:
        return live_peak(self.trace)

    @property
    def is_even(self) -> bool:
        """Masks that share places out were taken to be even."""
        return self.answers.shares and self.shares_out

    @property
    def may_be_drawn(self) -> bool:
        """Values that it draws may decide what it holds."""
        if self.is_even and not (self.follows_data or self.reads_integers):
            return self.reads_draws
        return self.answers.trusts_data or self.reads_draws


@dataclass
class Chosen(Generic[T]):
    """The trace that is planned."""

    found: T
    is_unsure: bool
    """Integers that were read may be sizes."""
    notes: list[str] = field(default_factory=list)


def as_its_data_need(
    attempt: Callable[[Answers], Attempt[T]], has_compiler: bool = True
) -> Chosen[T]:
    """Return the one of a few attempts that holds the most.

    Further ones are made as long as they take no longer than a minute. Raises CannotPlan as the first attempt does.
    """
    started = time.process_time()
    try:
        most = last = attempt(AS_BOUNDS)
    except KernelNotCompiled:
        if has_compiler:  # else the script keeps its kernel where nobody finds it
            with suppress(MptError):
                return _without_compiler(attempt)
        raise
    except EndlessLoop as error:
        with suppress(MptError):
            return _with_draws(attempt, attempt(COMPUTING), started, ALL_COMPUTED.format(error.why))
        most = last = attempt(Answers(waits=True))
    except CannotPlan as error:
        if not follows_from_value(error):
            raise
        with suppress(MptError):
            return _with_draws(attempt, _of_data(attempt), started)
        with suppress(MptError):
            return _with_draws(attempt, attempt(Answers(finds=True)), started)
        with suppress(MptError):
            return _with_draws(attempt, attempt(COMPUTING), started, ALL_COMPUTED.format(NO_OTHER))
        raise
    if most.loop and time.process_time() - started < PATIENCE:
        with suppress(MptError):
            computed = attempt(COMPUTING)
            if not computed.loop:
                note = ALL_COMPUTED.format(GOES_ROUND.format(most.loop))
                return _with_draws(attempt, computed, started, note)
    asks = most.reads_integers or most.is_bounded or most.evens_counts or most.shares_out
    if asks and time.process_time() - started < PATIENCE:
        with suppress(MptError):
            last = _of_data(attempt)
    is_of_data = (last.follows_data or last.is_even) and most.peak > NEAR * last.peak
    first = last if is_of_data else max(most, last, key=lambda one: one.peak)
    words = OF_DATA if last.follows_data else LARGER
    notes = [words.format(describe_bytes(most.peak))] if is_of_data else []
    if first.asks_masks and time.process_time() - started < PATIENCE:
        with suppress(MptError):
            answered_yes = attempt(replace(first.answers, finds=True))
            first = max(first, answered_yes, key=lambda one: one.peak)
    is_unsure = last.reads_integers
    if is_unsure and time.process_time() - started < DRAW_PATIENCE:
        with suppress(MptError):
            computed = attempt(BRIEFLY)
            is_unsure = False
            if computed.peak > first.peak:
                first, notes = computed, [ALL_COMPUTED.format(INTEGERS)]
    chosen = _with_draws(attempt, first, started, bounds=most if is_of_data else None)
    of_data = [] if chosen.found is most.found else notes
    return Chosen(chosen.found, is_unsure, [*chosen.notes, *of_data])


def _of_data(attempt: Callable[[Answers], Attempt[T]]) -> Attempt[T]:
    """Return an attempt with the values of its data, and with even masks if it asks for all that share places out."""
    found = attempt(Answers(trusts_data=True, shares=True))
    return attempt(Answers(trusts_data=True)) if found.is_partial else found


def _without_compiler(attempt: Callable[[Answers], Attempt[T]]) -> Chosen[T]:
    """Return an attempt at a script that does without its kernels where they cannot be compiled."""
    with extensions_forgotten():
        chosen = as_its_data_need(
            lambda answers: attempt(replace(answers, has_compiler=False)), has_compiler=False
        )
    chosen.notes.append(WITHOUT_KERNELS)
    return chosen


def _with_draws(
    attempt: Callable[[Answers], Attempt[T]],
    first: Attempt[T],
    started: float,
    *notes: str,
    bounds: Attempt[T] | None = None,
) -> Chosen[T]:
    """Return the attempt, the one with other draws that holds the most, or the one at its bounds if that is near it."""
    made = [first]
    trusts_data = first.answers.trusts_data or first.reads_draws
    for seed in SEEDS if first.draws or first.may_be_drawn else ():
        if time.process_time() - started > DRAW_PATIENCE:
            break
        with suppress(MptError):
            other = attempt(replace(first.answers, trusts_data=trusts_data, seed=seed))
            if first.has_hurried or not other.has_hurried:
                made.append(other)
    most = max(made, key=lambda one: one.peak)
    least = min(one.peak for one in made)
    found = [*notes]
    is_bound = bounds is not None and most.peak <= bounds.peak <= NEAR * most.peak
    if least < ALIKE * most.peak:
        found.append(
            f"its memory depends on numbers that it draws: {describe_bytes(least)} to {describe_bytes(most.peak)} of "
            f"tensors in {len(made)} draws. {AT_BOUNDS if is_bound else LARGEST_DRAW}"
        )
    elif first.batches_differ and len(made) == 1:
        found.append(FEW_BATCHES)
    if is_bound:
        assert bounds is not None
        most = bounds
    return Chosen(most.found, first.reads_integers, found)
