"""Where two trainings part: the first step, operator or parameter, the part that rounding explains of it, and why.

Both are taken in lockstep. While they are the same to the bit nothing else is needed. At the first difference a third
training sets out from the same state: the first one in float32, its weights and inputs moved by half a unit in the last
place of the coarser dtype whenever gradients are computed. How far that one gets from the first is what rounding alone
would do, chaos included. A difference is beyond rounding if it is more than eight times that.

The place is found by taking the step again under instruments: the first operator whose result differs although its
inputs do not (or do by rounding only).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpt.config.differences import Difference
from mpt.doctor.measuring.culprits import BEYOND_ROUNDING
from mpt.doctor.measuring.instrument import error_of
from mpt.doctor.measuring.measured_step import Step
from mpt.doctor.measuring.refusals import Refusal
from mpt.doctor.numerics.numerics import SMALLEST_SHARE
from mpt.doctor.partings.difference import FLOOR_UNITS, NOISE, differing, moves_apart, same, total
from mpt.doctor.partings.lockstep import Training
from mpt.doctor.partings.parting import Comparison, Parting, exceeds
from mpt.doctor.partings.reasons import Reasons
from mpt.engine.building.start_notes import lost_decay
from mpt.errors import CheckpointError, ConfigError
from mpt.seams import Batch, Phase


class Lockstep:
    """Two trainings side by side. `differences` are the settings in which they differ."""

    def __init__(
        self, first: Training, second: Training, differences: Sequence[Difference]
    ) -> None:
        self.first, self.second = first, second
        self.reasons = Reasons(first, second, differences)
        self.unit = self.reasons.unit
        self.third: Training | None = None
        self.begun: dict[str, Tensor] = {}

    def compare(self, start: int, steps: int) -> Comparison:
        """Take steps until the trainings are further apart than rounding explains."""
        found = Comparison(start, 0)
        found.bits = self.compare_start(start)
        if found.bits is not None and (
            found.bits.error is None or found.bits.error > FLOOR_UNITS * self.unit
        ):
            found.beyond = found.bits
            return found
        self.begun = {name: value.detach().clone() for name, value in self.first.weights().items()}
        for step in range(start, start + steps):
            self.step(step, found)
            found.steps += 1
            if found.beyond is not None:
                break
        for letter, side in (("A", self.first), ("B", self.second)):
            lost = lost_decay(side.config, side.run.optimizer_settings, side.run.precision.numerics)
            found.notes += [f"{letter}: {note}" for note in lost]
            for phase, scale in side.settled.items():
                found.notes.append(
                    f"{letter}: gradients of {phase} overflowed until the loss scale was {scale:g}; these steps were "
                    "repeated, where a training skips them"
                )
        return found

    def compare_start(self, start: int) -> Parting | None:
        """Compare networks and weights before the first step."""
        one, other = self.first.weights(), self.second.weights()
        if not one.keys() & other.keys():
            raise ConfigError(
                f"mpt diff: the trainings have no network in common (task {self.first.config.task.name} with model "
                f"{self.first.config.model.name}, and {self.second.config.task.name} with "
                f"{self.second.config.model.name}); name two of one task"
            )
        for name in [*one, *(name for name in other if name not in one)]:
            shapes = [tuple(side[name].shape) if name in side else None for side in (one, other)]
            if shapes[0] != shapes[1]:
                said = [f"shape {shape}" if shape is not None else "absent" for shape in shapes]
                reason = f"other networks: {self.reasons.settings('model', 'task', 'dataset') or 'built otherwise'}"
                return Parting(start, "", "network", name, said[0], said[1], reason)
        names = [[phase.name for phase in side.run.phases] for side in (self.first, self.second)]
        if names[0] != names[1]:
            reason = f"other tasks: {self.reasons.settings('task', 'model') or 'built otherwise'}"
            return Parting(
                start, "", "network", "phases", ", ".join(names[0]), ", ".join(names[1]), reason
            )
        for name, value in one.items():
            if not same(value, other[name]):
                error = error_of(other[name].float().cpu(), value.float().cpu())
                return Parting(
                    start,
                    "",
                    "weights",
                    name,
                    "",
                    "",
                    self.reasons.of_weights(error),
                    error,
                    self.unit / 2,
                )
        return None

    def step(self, step: int, found: Comparison) -> None:
        """Take one step of all, and note the differences."""
        sides = [self.first, self.second]
        before = [side.snapshot() for side in sides]
        batches = [side.batch(step) for side in sides]
        if found.bits is None:
            found.bits = self.reasons.compare_batches(step, *batches)
            if found.bits is not None:
                found.beyond = found.bits  # other data are no rounding
                return
        told = self.take_both(step, batches, found)
        if told is None:
            return
        equal = told[0] == told[1] and not differing(self.first.weights(), self.second.weights())
        if not equal and self.third is None:
            self.third = self.set_out(before[0], step, found)
        if not equal or self.third is not None:
            self.judge(step, batches, before, told, found)
        found.rows.append(self.row(step, told))

    def take_both(
        self, step: int, batches: Sequence[Batch], found: Comparison
    ) -> list[Told] | None:
        """Take a step of both. If one alone is refused, note that and return None; raise errors that both meet."""
        told: list[Told] = []
        refusals: list[Refusal | None] = []
        for side, batch in zip((self.first, self.second), batches, strict=True):
            try:
                told.append(take(side, step, batch))
                refusals.append(None)
            except (
                Exception
            ) as error:  # the model, or torch, refuses a step that the other training takes
                refusals.append(Refusal.of(error, side.run.task.modules))
                failure = error
        if all(refusals):
            raise failure
        if not any(refusals):
            return told
        found.beyond = self.refused(step, *refusals)
        found.bits = found.bits or found.beyond
        return None

    def judge(
        self,
        step: int,
        batches: Sequence[Batch],
        before: Sequence[dict[str, Any]],
        told: Sequence[Told],
        found: Comparison,
    ) -> None:
        """Note the first place that differs, and the first beyond rounding, of a step that was taken from `before`."""
        before_third = self.third.snapshot() if self.third is not None else None
        third = (
            take(self.third, step, batches[0], self.unit / 2) if self.third is not None else None
        )
        is_first, is_beyond = found.bits is None, self.is_beyond(told[0], told[1], third)
        if not is_first and not is_beyond:
            return
        after = [side.snapshot() for side in (self.first, self.second)]
        after_third = self.third.snapshot() if self.third is not None else None
        unplaced = self.reasons.unplaced(step, [side.losses for side in told])
        self.rewind(before, before_third)
        place = self.place(step, batches, exact=is_first)
        if is_first:
            found.bits = place or unplaced
        if is_beyond:
            if place is not None and not exceeds(place, self.unit):
                self.rewind(before, before_third)
                place = self.place(step, batches, exact=False)
            found.beyond = place or unplaced
        self.rewind(after, after_third)

    def refused(self, step: int, *refusals: Refusal | None) -> Parting:
        """Return the place at which one of the two raises."""
        said = [f"raises {one.text}" if one is not None else "a result" for one in refusals]
        place = next(one for one in refusals if one is not None).describe()
        reason = self.reasons.settings("precision", "model", "task", "memory") or "its dtypes"
        return Parting(step, "", "operator", place or "the step", said[0], said[1], reason)

    def rewind(self, states: Sequence[dict[str, Any]], third: dict[str, Any] | None) -> None:
        """Put the states of all back."""
        self.first.restore(states[0])
        self.second.restore(states[1])
        if self.third is not None and third is not None:
            self.third.restore(third)

    def set_out(self, state: dict[str, Any], step: int, found: Comparison) -> Training | None:
        """Build the training that shows the effect of rounding, in the state of the first."""
        try:
            third = self.first.float32_twin()
            third.restore(state)
        except CheckpointError as error:
            found.notes.append(
                f"rounding is judged by the dtype alone, as a float32 twin cannot set out here: {error}"
            )
            return None
        return third

    def is_beyond(self, one: Told, other: Told, third: Told | None) -> bool:
        """Return whether losses, skips or weights are further apart than rounding explains."""
        floor = FLOOR_UNITS * self.unit
        if one.skipped != other.skipped and (third is None or third.skipped == one.skipped):
            return True
        for name, value in one.losses.items():
            now = other.losses.get(name, math.nan)
            if not math.isfinite(now) and not math.isfinite(value):
                continue
            scale = abs(value) or 1.0
            error, rounding = abs(now - value) / scale, 0.0
            if third is not None:
                rounding = abs(third.losses.get(name, value) - value) / scale
            if not error <= max(floor, BEYOND_ROUNDING * rounding):
                return True
        return bool(self.weights_beyond())

    def weights_beyond(self) -> dict[str, tuple[float, float]]:
        """Return the weights that are further apart than rounding explains, each with its error and rounding's.

        All together are judged by their norm, and each by the median of its elements: since Adam divides by a gradient
        that is all but zero, rounding turns a few elements round, in one training and not in another. A weight whose
        move is noise already, as that of a bias in front of BatchNorm, is held against the moves of all.
        """
        floor = FLOOR_UNITS * self.unit
        weights = self.first.weights()
        moves = moves_apart(weights, self.second.weights(), self.begun)
        near = (
            moves_apart(weights, self.third.weights(), self.begun) if self.third is not None else {}
        )
        moved = math.sqrt(sum(move.moved**2 for move in moves.values()))
        found = {}
        for name, move in moves.items():
            from_rounding = near[name].typical if name in near else 0.0
            is_noise = not from_rounding <= NOISE or move.moved <= SMALLEST_SHARE * moved
            if is_noise and move.apart <= floor * moved:
                continue
            if not move.typical <= max(floor, BEYOND_ROUNDING * from_rounding):
                found[name] = (move.typical, from_rounding)
        rounding = total(near)
        if not found and not total(moves) <= max(floor, BEYOND_ROUNDING * rounding):
            worst = max(moves, key=lambda name: moves[name].apart)
            found[worst] = (moves[worst].share, near[worst].share if worst in near else 0.0)
        return found

    def place(self, step: int, batches: Sequence[Batch], *, exact: bool) -> Parting | None:
        """Take a step again under instruments and return the first place that differs, at all or beyond rounding."""
        sides = [self.first, self.second, *([self.third] if self.third is not None else [])]
        given = [*batches, batches[0]]
        phases = [side.due(step) for side in sides]
        for index, phase in enumerate(phases[0]):
            looks = []
            for side, batch, own in zip(sides, given, phases, strict=False):
                with side.in_turn(step):
                    looks.append(
                        side.look(own[index], batch, self.unit / 2 if side is self.third else None)
                    )
            found = self.reasons.place_in(step, phase.name, looks, exact=exact)
            if found is not None:
                return found
            skipped = []
            for side, batch, own in zip(sides, given, phases, strict=False):
                with side.in_turn(step):
                    if side is self.third:
                        _, skip = side.moved_update(own[index], batch, self.unit / 2)
                    else:
                        _, skip = side.update(own[index], batch)
                skipped.append(skip)
            found = self.place_after(step, phase, looks, skipped, exact=exact)
            if found is not None:
                return found
        return None

    def place_after(
        self,
        step: int,
        phase: Phase,
        looks: Sequence[Step],
        skipped: Sequence[bool],
        *,
        exact: bool,
    ) -> Parting | None:
        """Return the first weight that differs after an update whose gradients were the same."""
        if skipped[0] != skipped[1]:
            said = ["skipped" if skip else "taken" for skip in skipped[:2]]
            reason = f"loss scale: {looks[0].scale} against {looks[1].scale}; gradients overflowed in one"
            return Parting(
                step, phase.name, "skip", f"the step of {phase.name}", said[0], said[1], reason
            )
        one, other = self.first.weights(), self.second.weights()
        names = differing(one, other) if exact else list(self.weights_beyond())
        if not names:
            return None
        name = names[0]
        move = moves_apart({name: one[name]}, other, self.begun).get(name)
        near = (
            moves_apart({name: one[name]}, self.third.weights(), self.begun).get(name)
            if self.third is not None
            else None
        )
        settings = self.reasons.settings("optimizer", "train", "precision", "memory", "task")
        reason = f"the update: {settings}" if settings else "the update, or a buffer's"
        error, rounding = (
            move.share if move is not None else None,
            near.share if near is not None else None,
        )
        return Parting(step, phase.name, "update", name, "", "", reason, error, rounding)

    def row(self, step: int, told: Sequence[Told]) -> dict[str, Any]:
        """Return a step's figures."""
        weights = self.first.weights()
        third = (
            total(moves_apart(weights, self.third.weights(), self.begun))
            if self.third is not None
            else None
        )
        return {
            "step": step,
            "losses": [told[0].losses, told[1].losses],
            "skipped": [sorted(told[0].skipped), sorted(told[1].skipped)],
            "weights_apart": total(moves_apart(weights, self.second.weights(), self.begun)),
            "rounding": third,
        }


@dataclass(frozen=True)
class Told:
    """A training's log of a step."""

    losses: Mapping[str, float]
    skipped: frozenset[str]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Told) and repr(self) == repr(other)  # NaN equals itself here

    __hash__ = None  # type: ignore[assignment]


def take(side: Training, step: int, batch: Batch, amount: float | None = None) -> Told:
    """Take a step; with an amount, of weights and inputs that are moved."""
    losses: dict[str, float] = {}
    skipped = set()
    with side.in_turn(step):
        for phase in side.due(step):
            if amount is None:
                found, skip = side.update(phase, batch)
            else:
                found, skip = side.moved_update(phase, batch, amount)
            losses.update(found)
            if skip:
                skipped.add(phase.name)
        side.after_step(step)
    return Told(losses, frozenset(skipped))
