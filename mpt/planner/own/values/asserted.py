"""Conditions that a script asserts, or without which it raises an error: they hold in a run.

`assert (boxes[:, 2:] >= boxes[:, :2]).all()` reads a value, and a value that is read is 0: the step would end there.
`if not (boxes[:, 2:] >= boxes[:, :2]).all(): raise ValueError(...)` is the same. Whether a read decides one is seen in
the code that reads: its next jump leads to a raise if the value is false.
"""

from __future__ import annotations

import dis
import functools
from types import CodeType, FrameType

from mpt.planner.trace.cannot_plan import outer_frame

BETWEEN = frozenset({"CACHE", "CALL", "PRECALL", "TO_BOOL", "COPY"})
"""Instructions between a read and the jump: of `bool(x)`, `x.item()` and the like."""
TURNS = frozenset({"FOR_ITER", "SEND", "RERAISE", "YIELD_VALUE"})
RAISES = "RAISE_VARARGS"


def is_asserted(frame: FrameType | None) -> bool:
    """Return whether the innermost line outside torch, of a frame and its callers, raises if it reads false."""
    found = outer_frame(frame)
    return found is not None and found.f_lasti in _reads_for_assertions(found.f_code)


@functools.cache
def _reads_for_assertions(code: CodeType) -> frozenset[int]:
    """Return the places in a function of instructions whose false result would raise an error."""
    steps = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    raising = _before_raises(steps)
    if not raising:
        return frozenset()
    ends = [*(one.offset for one in steps[1:]), len(code.co_code)]
    found: set[int] = set()
    for place, one in enumerate(steps):
        if "JUMP" not in one.opname or "IF" not in one.opname:
            continue
        raises = ends[place] in raising if "IF_TRUE" in one.opname else one.argval in raising
        if not (raises and ("IF_TRUE" in one.opname or "IF_FALSE" in one.opname)):
            continue
        first = place
        while first and steps[first - 1].opname in BETWEEN:
            first -= 1
        # a call's place is that of any of its code units
        found.update(range(steps[first].offset, ends[place], 2))
    return frozenset(found)


def _before_raises(steps: list[dis.Instruction]) -> set[int]:
    """Return the places from which a function goes straight to a raise."""
    found: set[int] = set()
    is_raising = False
    for one in reversed(steps):
        is_raising = one.opname == RAISES or (is_raising and not _is_turn(one))
        if is_raising:
            found.add(one.offset)
    return found


def _is_turn(step: dis.Instruction) -> bool:
    """Return whether a function may continue elsewhere than at its next instruction."""
    return "JUMP" in step.opname or "RETURN" in step.opname or step.opname in TURNS
