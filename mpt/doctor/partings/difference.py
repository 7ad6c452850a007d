"""Two steps held against each other: which tensors, operators and weights differ, and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpt.doctor.measuring.culprits import BEYOND_ROUNDING, result_error
from mpt.doctor.measuring.instrument import Result, input_error
from mpt.doctor.partings.pairing import counterparts

FLOOR_UNITS = 64
"""A relative error of that many units of the coarser dtype is rounding in any case: sums of many terms reach it."""

NOISE = 0.5
"""A value that rounding moves by this share of itself says nothing: its true value is zero, or nearly."""


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


def moves_apart(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], begun: Mapping[str, Tensor]
) -> dict[str, Move]:
    """Return how far each weight was moved from its start, and how far apart two trainings moved it."""
    found = {}
    for name, value in one.items():
        if not value.is_floating_point():
            continue
        moved = (value - begun[name]).float()
        apart = (other[name].float() - value.float()).abs()
        last_places = 4 * torch.finfo(value.dtype).eps * value.float().abs()
        apart = torch.where(apart <= last_places, 0.0, apart)
        there = (moved != 0) | (apart != 0)
        shares = apart[there] / moved[there].abs()
        found[name] = Move(
            typical=float(shares.median()) if shares.numel() else 0.0,
            apart=float(apart.norm()),
            moved=float(moved.norm()),
        )
    return found


def total(moves: Mapping[str, Move]) -> float:
    """Return the distance of all weights together, as a share of how far they moved."""
    moved = math.sqrt(sum(move.moved**2 for move in moves.values()))
    apart = math.sqrt(sum(move.apart**2 for move in moves.values()))
    return apart / moved if moved else (math.inf if apart else 0.0)


def split_of(one: Sequence[Result], other: Sequence[Result]) -> str | None:
    """Say that one of the two computes its batch in parts, and its effect on BatchNorm; None if neither does."""
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


Pair = tuple[Result | None, Result | None]
"""An operator of each training; None on a side that lacks it."""


def first_operator(
    one: Sequence[Result],
    other: Sequence[Result],
    third: Sequence[Result],
    unit: float,
    *,
    exact: bool,
    is_scaled: bool = True,
) -> Pair | None:
    """Return the first operator whose results differ, at all or beyond rounding.

    `is_scaled`: whether the two have different loss scales.
    """
    matches = counterparts(one, other)
    if exact:
        return first_other_bits(one, other, matches)
    worst: tuple[float, Result, Result] | None = None
    for result, match, near in zip(one, matches, counterparts(one, third), strict=True):
        if match is None:
            continue
        if result.shape != match.shape:
            return result, match
        error = result_error(match, result, is_scaled=is_scaled)
        if math.isnan(error):
            continue
        rounding = result_error(near, result) if near is not None else 0.0
        limit = max(
            FLOOR_UNITS * unit, BEYOND_ROUNDING * (0.0 if math.isnan(rounding) else rounding)
        )
        if error > limit:
            if input_error(match.inputs, result.inputs) < error / 4:
                return result, match
            if worst is None or error > worst[0]:
                worst = (error, result, match)
    if worst is not None:
        return worst[1], worst[2]
    return None


def first_other_bits(
    one: Sequence[Result], other: Sequence[Result], matches: Sequence[Result | None]
) -> Pair | None:
    """Return the first operator whose results are not the same to the bit, or one that only one side has.

    One without a counterpart is to blame only if the next results get other inputs.
    """
    paired = {id(match) for match in matches}
    places = {id(result): place for place, result in enumerate(other)}
    alone: Pair | None = None
    reached = 0
    for result, match in zip(one, matches, strict=True):
        if match is None:
            alone = alone or (
                result,
                stand_in(result, [each for each in other if id(each) not in paired]),
            )
            continue
        place = places[id(match)]
        added = next((each for each in other[reached:place] if id(each) not in paired), None)
        reached = max(reached, place + 1)
        if added is not None and alone is None:
            alone = (None, added)
        if result.has_bits_of(match):
            continue
        has_same_inputs = result.inputs_fingerprint == match.inputs_fingerprint
        return (result, match) if alone is None or has_same_inputs else alone
    return alone


def stand_in(result: Result, other: Sequence[Result]) -> Result | None:
    """Return the calls of the other training if a result has no counterpart: a result of the same module and
    direction that the first lacks, if its size is the same.
    """
    for one in other:
        same_place = one.module == result.module and one.is_backward == result.is_backward
        if same_place and one.operator != result.operator and one.shape == result.shape:
            return one
    return None
