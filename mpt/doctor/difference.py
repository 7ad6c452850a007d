"""Two steps held against each other: which tensors, operators and weights differ, and by how much."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpt.doctor.culprits import BEYOND_ROUNDING, error_without_scale
from mpt.doctor.instrument import Result, input_error

FLOOR_UNITS = 64
"""A relative error of so many units of the coarser dtype is rounding in any case: sums of many terms reach it."""


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal to the bit, NaN being equal to NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_floating_point():
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    return torch.equal(one, other)


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the names under which two mappings hold different tensors."""
    return [name for name, value in one.items() if not same(value, other[name])]


@dataclass(frozen=True)
class Move:
    """How far a weight was moved since the start, and how far apart two trainings moved it; norms over its elements."""

    typical: float
    """The median over the elements of how far apart they are, as a share of how far they were moved."""
    apart: float
    moved: float

    @property
    def share(self) -> float:
        """How far apart they are as a share of how far the first moved it."""
        return self.apart / self.moved if self.moved else (math.inf if self.apart else 0.0)


def total(moves: Mapping[str, Move]) -> float:
    """Return the distance of all weights together, as a share of how far they moved."""
    moved = math.sqrt(sum(move.moved**2 for move in moves.values()))
    apart = math.sqrt(sum(move.apart**2 for move in moves.values()))
    return apart / moved if moved else (math.inf if apart else 0.0)


def split_of(one: Sequence[Result], other: Sequence[Result]) -> str | None:
    """Say that one of the two computes its batch in parts, and what that does to BatchNorm; None where neither does."""
    there = {result.key: result for result in other}
    for result in one:
        match = there.get(result.key)
        if match is None or match.shape == result.shape or len(match.shape) != len(result.shape):
            continue
        if result.shape[1:] != match.shape[1:] or not result.shape:
            continue
        counts = f"{result.shape[0]} samples at a time against {match.shape[0]}"
        if any("batch_norm" in each.operator for each in (*one, *other)):
            return f"BatchNorm's batch: {counts}"
        return f"the batch in parts: {counts}, so sums are added in another order"
    return None


def first_operator(
    one: Sequence[Result], other: Sequence[Result], third: Sequence[Result], unit: float, *, exact: bool
) -> tuple[Result | None, Result | None] | None:
    """Return the first operator whose results differ, at all or beyond rounding; None on a side that lacks it."""
    there = {result.key: result for result in other}
    moved = {result.key: result for result in third}
    known = {result.key for result in one}
    worst: tuple[float, Result, Result] | None = None
    for result in one:
        match = there.get(result.key)
        if match is None:
            if exact:
                return result, stand_in(result, other)
            continue
        if exact:
            if not result.has_bits_of(match):
                more = first_without(other, match, known)
                return (None, more) if more is not None else (result, match)
            continue
        if result.shape != match.shape:
            return result, match
        error = error_without_scale(match.sample, result.sample)
        if math.isnan(error):
            continue
        near = moved.get(result.key)
        rounding = error_without_scale(near.sample, result.sample) if near is not None else 0.0
        limit = max(FLOOR_UNITS * unit, BEYOND_ROUNDING * (0.0 if math.isnan(rounding) else rounding))
        if error > limit:
            if input_error(match.inputs, result.inputs) < error / 4:
                return result, match
            if worst is None or error > worst[0]:
                worst = (error, result, match)
    if worst is not None:
        return worst[1], worst[2]
    return None


def first_without(
    results: Sequence[Result], end: Result, known: Collection[tuple[str, str, bool, int]]
) -> Result | None:
    """Return the first of the results before `end` that has no counterpart."""
    for result in results:
        if result is end:
            return None
        if result.key not in known:
            return result
    return None


def stand_in(result: Result, other: Sequence[Result]) -> Result | None:
    """Return what runs in the other training where a result has no counterpart: a result of the same module and
    direction that the first lacks, if its size is the same.
    """
    for one in other:
        same_place = one.module == result.module and one.is_backward == result.is_backward
        if same_place and one.operator != result.operator and one.shape == result.shape:
            return one
    return None
