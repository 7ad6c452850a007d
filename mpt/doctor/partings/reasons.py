"""Why two trainings part: reasons found in their settings, operators and random numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mpt.config.differences import Difference
from mpt.doctor.measuring.culprits import BEYOND_ROUNDING, result_error
from mpt.doctor.measuring.instrument import Result, error_of
from mpt.doctor.measuring.measured_step import Step
from mpt.doctor.numerics.numerics import SMALLEST_SHARE
from mpt.doctor.partings.difference import FLOOR_UNITS, NOISE, first_operator, same, split_of
from mpt.doctor.partings.lockstep import Training
from mpt.doctor.partings.parting import Parting
from mpt.seams import Batch

RANDOM = (
    "bernoulli",
    "dropout",
    "normal",
    "uniform",
    "rand",
    "multinomial",
    "exponential",
    "rrelu",
    "poisson",
)
SUMS: tuple[str, ...] = (
    "sum",
    "mean",
    "mm",
    "bmm",
    "mv",
    "dot",
    "conv",
    "norm",
    "var",
    "std",
    "einsum",
    "index_add",
    "scatter_add",
)
SUMS += (
    "embedding_dense_backward",
    "grid_sampler",
    "upsample",
    "attention",
    "cumsum",
    "interpolate",
    "loss",
)


class Reasons:
    """Finds and explains differences between two trainings, which differ in these settings."""

    def __init__(
        self, first: Training, second: Training, differences: Sequence[Difference]
    ) -> None:
        self.first, self.second, self.differences = first, second, differences
        self.unit = max(first.unit, second.unit)

    def settings(self, *sections: str) -> str:
        """Return the differing settings of some sections in words."""
        return ", ".join(str(one) for one in self.differences if one.key.split(".")[0] in sections)

    def of_weights(self, error: float) -> str:
        """Say why weights differ before the first step."""
        if error <= self.unit:
            return "dtype: one keeps its weights in fewer bits"
        if self.first.config.seed != self.second.config.seed:
            return f"other random numbers: seed {self.first.config.seed} against {self.second.config.seed}"
        return (
            f"other initial weights: {self.settings('model', 'task', 'seed') or 'drawn otherwise'}"
        )

    def operator_parting(
        self,
        step: int,
        phase: str,
        one: Result | None,
        other: Result | None,
        *,
        is_scaled: bool = True,
    ) -> Parting:
        """Describe an operator whose result differs."""
        if one is None or other is None or one.operator != other.operator:
            there = one or other
            assert there is not None
            said = [
                side.operator if side is not None else "nothing like it" for side in (one, other)
            ]
            differing_settings = self.settings("model", "task", "precision", "memory")
            reason = "another operator runs here: another kernel, graph or mode"
            reason += f" ({differing_settings})" if differing_settings else ""
            return Parting(step, phase, "operator", there.describe(), said[0], said[1], reason)
        error = result_error(other, one, is_scaled=is_scaled)
        sides = [f"{str(side.dtype).removeprefix('torch.')}" for side in (one, other)]
        if one.dtype == other.dtype:
            sides = ["", ""]
        return Parting(
            step,
            phase,
            "operator",
            one.describe(),
            sides[0],
            sides[1],
            self.of_operator(one, other, error),
            error,
        )

    def of_operator(self, one: Result, other: Result, error: float) -> str:
        """Say why an operator's result differs."""
        inputs_equal = one.inputs_fingerprint == other.inputs_fingerprint
        if (
            any(name in one.operator for name in RANDOM)
            and inputs_equal
            and "norm" not in one.operator
        ):
            seeds = self.settings("seed")
            return "other random numbers" + (f" ({seeds})" if seeds else "")
        if one.dtype != other.dtype:
            modes = [side.config.precision.mode for side in (self.first, self.second)]
            said = (
                f"precision {modes[0]} against {modes[1]}"
                if modes[0] != modes[1]
                else self.settings("precision")
            )
            return f"dtype: {said}" if said else "dtype"
        if one.scalars != other.scalars:
            settings = self.settings("model", "task", "memory")
            return f"another setting of it: ({one.scalars}) against ({other.scalars})" + (
                f"; {settings}" if settings else ""
            )
        if inputs_equal and error <= FLOOR_UNITS * self.unit:
            if any(name in one.operator for name in SUMS):
                reason = "order of a sum: another kernel, memory format or number of threads"
            else:
                reason = "another kernel for the same operator"
            settings = self.settings("memory", "precision", "train")
            return f"{reason} ({settings})" if settings else reason
        settings = self.settings("model", "task", "precision", "memory", "optimizer", "train")
        return (
            f"settings that differ: {settings}"
            if settings
            else "not known; the settings are the same"
        )

    def compare_batches(self, step: int, one: Batch, other: Batch) -> Parting | None:
        """Compare the batches that the two data sets deliver for a step."""
        for name in [*one, *(name for name in other if name not in one)]:
            shapes = [tuple(side[name].shape) if name in side else None for side in (one, other)]
            said = [f"shape {shape}" if shape is not None else "absent" for shape in shapes]
            if shapes[0] != shapes[1]:
                reason = (
                    f"other data: {self.settings('dataset', 'train', 'model') or 'the sets differ'}"
                )
                return Parting(step, "", "batch", f"batch field {name!r}", said[0], said[1], reason)
        for name, value in one.items():
            if not same(value, other[name]):
                indices = [side.loader.indices(step)[0] for side in (self.first, self.second)]
                if indices[0] != indices[1]:
                    reason = f"other samples or another order: {self.settings('seed', 'dataset', 'train') or 'unknown'}"
                else:
                    reason = f"the same samples, transformed otherwise: {self.settings('dataset', 'seed') or 'unknown'}"
                said = [f"samples {', '.join(map(str, some[:4]))}, ..." for some in indices]
                error = error_of(other[name].float().cpu(), value.float().cpu())
                return Parting(
                    step, "", "batch", f"batch field {name!r}", said[0], said[1], reason, error
                )
        return None

    def place_in(
        self, step: int, phase: str, looks: Sequence[Step], *, exact: bool
    ) -> Parting | None:
        """Return the first difference in a phase's forward and backward."""
        one, other = looks[0], looks[1]
        drawn = self.drawn_parting(step, phase, one, other, exact=exact)
        if drawn is not None:
            return drawn
        splits = split_of(one.results, other.results)
        if splits is None:
            third = looks[2].results if len(looks) > 2 else []
            is_scaled = (one.scale or 1.0) != (other.scale or 1.0)
            found = first_operator(
                one.results, other.results, third, self.unit, exact=exact, is_scaled=is_scaled
            )
            if found is not None:
                return self.operator_parting(step, phase, *found, is_scaled=is_scaled)
        return self.gradient_parting(step, phase, looks, splits, exact=exact)

    def drawn_parting(
        self, step: int, phase: str, one: Step, other: Step, *, exact: bool
    ) -> Parting | None:
        """Return the first random input of both that differs."""
        for name, value in one.drawn.items():
            there = other.drawn.get(name)
            if there is None or value.shape != there.shape or same(value, there):
                continue
            if not exact and error_of(there.float().cpu(), value.float().cpu()) <= self.unit:
                continue
            reason = "other random numbers: the generators' states differ"
            reason += f" ({self.settings('seed')})" if self.settings("seed") else ""
            return Parting(step, phase, "random numbers", f"drawn input {name!r}", "", "", reason)
        return None

    def gradient_parting(
        self, step: int, phase: str, looks: Sequence[Step], splits: str | None, *, exact: bool
    ) -> Parting | None:
        """Return the first gradient that differs, or that does by more than rounding explains."""
        one, other = looks[0], looks[1]
        whole = math.sqrt(sum(float(value.norm()) ** 2 for value in one.gradients.values()))
        for name, value in one.gradients.items():
            there = other.gradients.get(name)
            if there is None:
                continue
            error = error_of(there, value)
            rounding = (
                error_of(looks[2].gradients.get(name, value), value) if len(looks) > 2 else 0.0
            )
            is_noise = rounding > NOISE or float(value.norm()) <= SMALLEST_SHARE * whole
            if (
                not exact
                and is_noise
                and float((there - value).norm()) <= FLOOR_UNITS * self.unit * whole
            ):
                continue
            allowed = 0.0 if exact else max(FLOOR_UNITS * self.unit, BEYOND_ROUNDING * rounding)
            if error > allowed or (exact and not same(value, there)):
                reason = splits or "order of a sum, or arithmetic that no operator shows"
                return Parting(
                    step, phase, "gradient", f"gradient of {name}", "", "", reason, error, rounding
                )
        return None

    def unplaced(self, step: int, told: Sequence[Mapping[str, float]]) -> Parting:
        """Return a parting that no single step shows: small differences that added up."""
        said = [
            ", ".join(f"{name} {value:.6g}" for name, value in losses.items()) for losses in told
        ]
        reason = "differences of earlier steps added up; no operator of this step is to blame alone"
        settings = self.settings(
            "model", "task", "precision", "memory", "optimizer", "train", "dataset", "seed"
        )
        reason += f" (settings that differ: {settings})" if settings else ""
        return Parting(step, "", "loss", "losses and weights", said[0], said[1], reason)
