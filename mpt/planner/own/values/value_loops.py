"""Loops of which a value says how often they go round: `while end > reached:` of a solver with steps of its own size.

A value that is read is 0, so such a loop would end at once, and what each of its passes leaves for the backward pass
would be missing; or it would never end. Such a read is seen by its line: it is in the condition of a `while`, or of an
`if` that leaves a loop, as `if error.item() < 1e-6: break`. A step with such reads is planned with all of its values
(`mpt.planner.own.values.attempts`). Loops that train are none of them: they end after the steps that are planned.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from types import FrameType

from mpt.planner.own.text.places import text_of
from mpt.planner.trace.cannot_plan import CannotPlan, outer_frame

MOST = 2000
"""Times that a line reads the same answer before it gets the other one: a loop that waits for that would not end."""
MOST_KNOWN = 100
"""Times that a loop goes on by a value that is known, and reads others that are not: what it waits for follows from
those perhaps.
"""
UNKNOWN = (
    "a value that is not known says how often the loop at {} goes round: it was taken as 0, and if the loop goes round "
    "more often, the step needs more than planned"
)
GOES_ROUND = "since one says how often the loop at {} goes round"
TRAINING = ("backward", "zero_grad")
"""Names of calls in a loop that trains."""
Place = tuple[str, int]


class EndlessLoop(CannotPlan):
    """A loop goes on without end, since values that are not known were taken as 0."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"cannot plan: its loop at {place} goes on as long as values say that are not known"
        )
        self.why = GOES_ROUND.format(place)


class ValueLoops:
    """The values that loops read which a step does not know."""

    def __init__(self, waits: bool = False) -> None:
        self.waits = waits
        """No loop is taken to have no end."""
        self.lines: Counter[Place] = Counter()
        self._known: Counter[Place] = Counter()
        self._reads: dict[Place, int] = {}
        """How many values that are not known had been read when the line read one that is."""

    @property
    def first(self) -> str:
        """The file and line of one of them; nothing if there is none."""
        return "{}:{}".format(*min(self.lines)) if self.lines else ""

    def read(self, frame: FrameType | None) -> bool:
        """Note a read at the innermost line outside torch; return whether its loop has gone on for too long."""
        place = place_in_loop(frame)
        if place is None:
            return False
        self.lines[place] += 1
        return self.lines[place] % MOST == 0

    def read_known(self, frame: FrameType | None, reads: int) -> None:
        """Note a read of a known value, after `reads` of others. Raises EndlessLoop after many in a loop."""
        place = place_in_loop(frame)
        if place is None or self._reads.get(place) == reads:
            return
        self._known[place] += place in self._reads
        self._reads[place] = reads
        if self._known[place] >= MOST_KNOWN and not self.waits:
            raise EndlessLoop(f"{place[0]}:{place[1]}")

    def notes(self) -> list[str]:
        """Return the plan's assumptions."""
        return [UNKNOWN.format(self.first)] if self.lines else []


def place_in_loop(frame: FrameType | None) -> Place | None:
    """Return the innermost line outside torch if a loop goes on by it."""
    found = outer_frame(frame)
    if found is None or found.f_lineno not in lines_of_loops(found.f_code.co_filename):
        return None
    return found.f_code.co_filename, found.f_lineno


@functools.cache
def lines_of_loops(file: str) -> frozenset[int]:
    """Return the lines of a file's conditions that decide if a loop goes on."""
    try:
        tree = ast.parse(text_of(file))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    found: set[int] = set()
    for loop in ast.walk(tree):
        if isinstance(loop, ast.While | ast.For) and not _trains(loop):
            tests = [one.test for one in _leaving(loop.body)]
            for test in [loop.test, *tests] if isinstance(loop, ast.While) else tests:
                found.update(range(test.lineno, (test.end_lineno or test.lineno) + 1))
    return frozenset(found)


def _trains(loop: ast.AST) -> bool:
    """Return whether training steps are made in a loop."""
    return any(isinstance(one, ast.Attribute) and one.attr in TRAINING for one in ast.walk(loop))


def _leaving(body: list[ast.stmt]) -> Iterator[ast.If]:
    """Yield the statements of a loop's body that leave it if something holds, or if not."""
    for one in body:
        if isinstance(one, ast.If):
            if any(isinstance(last, ast.Break) for last in (*one.body, *one.orelse)):
                yield one
            yield from _leaving([*one.body, *one.orelse])
        elif isinstance(one, ast.With | ast.Try):
            yield from _leaving(one.body)
