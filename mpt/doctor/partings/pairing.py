"""Which operators of two steps are each other's, also if one of the steps has operators that the other lacks.

If both have the same, they are paired by module, direction, name and number. Else the calls of each module and
direction are aligned as the lines of two texts are (`difflib`): first by operator, shape and numbers, and the calls
between those by operator alone. So an added call shifts none of the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from difflib import SequenceMatcher

from mpt.doctor.measuring.instrument import Result


def counterparts(one: Sequence[Result], other: Sequence[Result]) -> list[Result | None]:
    """Return for each result of the first step the second's; None for one without."""
    by_key = {result.key: result for result in other}
    if by_key.keys() == {result.key for result in one}:
        return [by_key[result.key] for result in one]
    there = by_place(other)
    found: list[Result | None] = [None] * len(one)
    for place, mine in by_place(one).items():
        theirs = there.get(place, [])
        for first, second in aligned(
            [one[index] for index in mine], [other[index] for index in theirs]
        ):
            found[mine[first]] = other[theirs[second]]
    return found


def by_place(results: Sequence[Result]) -> dict[tuple[str, bool], list[int]]:
    """Return module and direction -> places of their results."""
    found = defaultdict(list)
    for index, result in enumerate(results):
        found[result.module, result.is_backward].append(index)
    return found


def aligned(one: Sequence[Result], other: Sequence[Result]) -> list[tuple[int, int]]:
    """Return the pairs of two lists of calls, as places in them."""
    mine, theirs = (
        [(each.operator, each.shape, each.scalars) for each in side] for side in (one, other)
    )
    pairs: list[tuple[int, int]] = []
    for kind, start, end, there, until in SequenceMatcher(
        None, mine, theirs, autojunk=False
    ).get_opcodes():
        if kind == "equal":
            pairs += list(zip(range(start, end), range(there, until), strict=True))
        elif kind == "replace":
            names, others = (
                [each.operator for each in side] for side in (one[start:end], other[there:until])
            )
            for block in SequenceMatcher(None, names, others, autojunk=False).get_matching_blocks():
                pairs += [
                    (start + block.a + place, there + block.b + place)
                    for place in range(block.size)
                ]
    return pairs
