"""The operators to blame for a wrong step: those that make a wrong result of right inputs, each independent of others.

Two steps are held against each other, float32's and the mode's, and a third in float32 with weights and inputs moved by
rounding shows the differences that are no operator's fault. Results of a wrong input are not blamed, whatever becomes
of it: a number that is wrong but finite often overflows layers later. If one fault hides the next, the step is taken
again with the first one's module in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from mpt.doctor.measuring.instrument import Result, error_of, input_error
from mpt.nn.shared.module_places import LOSS

Key = tuple[str, str, bool, int]
"""The key by which results of two steps are matched: `Result.key`."""
WRONG = 0.05
"""Relative error from which on a result is wrong, if rounding does not explain it."""
JUMP = 0.25
"""Relative error of a result that is wrong if the effect of rounding is unknown."""
BEYOND_ROUNDING = 8.0
"""An error is a fault from this multiple of the effect of rounding the inputs."""
INPUTS = 4
"""Times its inputs' error: a result that is wrong by more than this is its operator's doing."""


def find_culprits(
    true: Sequence[Result], seen: Sequence[Result], moved: Sequence[Result] = ()
) -> list[Result]:
    """Return the first wrong operator and those that are wrong independently of it, in order, one per line.

    Forward operators that are wrong beyond rounding; if there are none, those that are far off; then a backward
    operator; then the one whose result is furthest off.
    """
    beyond = list(origins(true, seen, {one.key: one for one in moved}))
    far = list(origins(true, seen, {}))
    chosen = [one for one in beyond if not one.is_backward] or [
        one for one in far if not one.is_backward
    ]
    chosen = chosen or beyond[:1] or far[:1]
    if not chosen:
        errors = [(error, one) for one, _, error in compared(true, seen) if not math.isnan(error)]
        error, worst = max(errors, key=lambda pair: pair[0], default=(0.0, None))
        chosen = [worst] if worst is not None and error > JUMP else []
    return list({(one.module, one.line or one.operator): one for one in reversed(chosen)}.values())[
        ::-1
    ]


def origins(
    true: Sequence[Result], seen: Sequence[Result], moved: Mapping[Key, Result]
) -> Iterator[Result]:
    """Yield the operators whose result is wrong although their inputs are not, in order."""
    for one, right, error in compared(true, seen):
        before = input_error(one.inputs, right.inputs)
        if one.non_finite and one.inputs_finite:
            if not before > WRONG:
                yield one
            continue
        if math.isnan(error) or before >= error / INPUTS:
            continue
        near = moved.get(one.key)
        limit = (
            JUMP
            if near is None
            else max(WRONG, BEYOND_ROUNDING * error_of(near.sample, right.sample))
        )
        if error > limit:
            yield one
    known = {one.key for one in true}
    for one in seen:
        if one.key not in known and one.non_finite and one.inputs_finite:
            yield one


def compared(
    true: Sequence[Result], seen: Sequence[Result]
) -> Iterator[tuple[Result, Result, float]]:
    """Yield the mode's operators with their counterpart in float32 and the error of their result."""
    by_key = {one.key: one for one in true}
    for one in seen:
        right = by_key.get(one.key)
        if right is not None and right.count:
            yield one, right, result_error(one, right)


def result_error(value: Result, true: Result, *, is_scaled: bool = True) -> float:
    """Return the error of an operator's result. If one of the steps has a loss scale, a power of two, that a backward
    operator or the loss is multiplied by is none.
    """
    error = error_of(value.sample, true.sample)
    norm, right = float(value.sample.norm()), float(true.sample.norm())
    may_be_scaled = is_scaled and (true.is_backward or true.module == LOSS)
    if (
        not may_be_scaled
        or error <= JUMP
        or not norm
        or not right
        or not math.isfinite(norm + right)
    ):
        return error
    return min(error, error_of(value.sample / 2.0 ** round(math.log2(norm / right)), true.sample))
