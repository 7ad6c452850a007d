"""One step in float32 and in the chosen mode, on the same weights, batch and random numbers: the losses, and their
places.

A healthy lower precision is as wrong as rounding its inputs would make it. So the float32 step is taken a third time
with weights and images moved by half a unit in the last place of the mode's dtype. An error that is large and many
times that effect is a fault: the arithmetic loses more than the dtype must. A gradient that is noise in float32
already (a bias in front of BatchNorm) is moved as much by the rounding as by the mode, and raises no alarm.

The operators to blame are those whose result is wrong although their inputs are not (`mpt.doctor.measuring.culprits`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mpt.config.schema import Config
from mpt.doctor.measuring.culprits import BEYOND_ROUNDING, find_culprits, result_error
from mpt.doctor.measuring.instrument import Result, error_of
from mpt.doctor.measuring.measured_step import Step, rounded_step, take_step
from mpt.doctor.measuring.refusals import Refusal
from mpt.doctor.measuring.weight_updates import Effect, effects, moves
from mpt.doctor.numerics.subject import Subject, with_float32
from mpt.engine.building.start_notes import lost_decay
from mpt.nn.shared.module_places import LOSS
from mpt.seams import Run

LARGE_LOSS, LARGE_GRADIENT, LARGE_BUFFER = 0.05, 0.3, 0.1
"""Relative errors from which on an error is looked at."""
MOST_HIDDEN = 4
"""Faults behind others that are looked for."""
SMALLEST_SHARE = 1e-4
"""Of the phase's gradient norm: parameters with less do not decide anything."""


@dataclass(frozen=True)
class Mode:
    """The arithmetic of a step that is examined."""

    name: str
    dtype: torch.dtype
    rounds_weights: bool = False
    """Whether it adds updates to weights in half and keeps nothing of what rounding takes."""

    @classmethod
    def of(cls, run: Run) -> Mode:
        """Return a run's."""
        numerics = run.precision.numerics
        return cls(run.precision.name, numerics.dtype, numerics.rounds_weights)

    @property
    def dtype_name(self) -> str:
        """Its dtype in words."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ParameterError:
    """How wrong one parameter's gradient is."""

    name: str
    error: float
    """Relative to the float32 gradient's norm."""
    from_rounding: float
    """The same with rounded inputs in float32."""
    cosine: float
    share: float
    """Of the norm of all gradients."""


@dataclass
class Examination:
    """Findings about one phase."""

    phase: str
    mode: str
    dtype: str
    scale: float | None
    losses: dict[str, tuple[float, float]]
    """Loss -> in float32, in the mode."""
    parameters: list[ParameterError]
    rounds_weights: bool = False
    """Whether the mode adds updates to weights in half and keeps nothing of the rounding errors."""
    faults: list[str] = field(default_factory=list)
    culprits: list[Result] = field(default_factory=list)
    """The operators to blame, in order: the first, and the faults independently of it."""
    refusal: Refusal | None = None
    """The exception of the mode's step, if float32's raised none."""
    results: list[Result] = field(default_factory=list)
    """The float32 step's operators: the effects of float16 on them."""
    seen: list[Result] = field(default_factory=list)
    """The mode's own."""
    lost_decay: list[str] = field(default_factory=list)
    """Warnings of weight decay that the rounding of weights takes."""
    broken_gradients: list[str] = field(default_factory=list)
    """Parameters whose gradient is not finite in float32, although the losses are."""
    by_cuda_lists: list[str] = field(default_factory=list)
    """Operators that a CPU computed in float32 because CUDA's autocast does."""
    updates: dict[str, Effect] = field(default_factory=dict)
    """Parameter -> its update in the mode; empty if the gradients are at fault already."""

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.faults

    @property
    def is_finite_in_float32(self) -> bool:
        """Whether there is a step to compare the mode's with."""
        return not self.broken_gradients and all(
            math.isfinite(right) for right, _ in self.losses.values()
        )


def examine(subject: Subject) -> list[Examination]:
    """Examine every phase of a step in the run's own mode. Raises ConfigError for anything that does not build."""
    reference, chosen = subject.build_reference(), subject.build(subject.config)
    found = []
    for true_phase, phase in zip(reference.phases, chosen.phases, strict=True):
        true = take_step(reference, true_phase, subject.batch, watched=True)
        moved = rounded_step(reference, true_phase, subject.batch, chosen.precision.numerics.dtype)
        try:
            step = take_step(chosen, phase, subject.batch, watched=True)
        except Exception as error:  # whatever the model or torch raises, float32 does not
            found.append(
                refused(phase.name, Mode.of(chosen), true, Refusal.of(error, chosen.task.modules))
            )
            continue
        found.append(judge(phase.name, Mode.of(chosen), true, moved, step))
        if not found[-1].is_healthy:
            dtype = chosen.precision.numerics.dtype
            moved = rounded_step(reference, true_phase, subject.batch, dtype, watched=True)
            found[-1].culprits = blame(subject, phase.name, true, moved, step)
    # Last: updates change the runs.
    for one, true_phase, phase in zip(found, reference.phases, chosen.phases, strict=True):
        if one.is_healthy:
            seen = moves(chosen, phase, subject.batch, one.scale)
            one.updates = effects(moves(reference, true_phase, subject.batch, None), seen)
            one.faults += faults_of(one.updates, one.dtype)
    found[-1].lost_decay = lost_decay(
        subject.config, chosen.optimizer_settings, chosen.precision.numerics
    )
    return found


def blame(subject: Subject, phase: str, true: Step, moved: Step, step: Step) -> list[Result]:
    """Return the operators to blame, also those that show only once the module of the first is in float32."""
    found = find_culprits(true.results, step.results, moved.results)
    for _ in range(MOST_HIDDEN):
        modules = list(dict.fromkeys(one.module for one in found))
        if not modules or LOSS in modules:
            break
        run = subject.build(with_float32(subject.config, modules))
        again = next(one for one in run.phases if one.name == phase)
        try:
            step = take_step(run, again, subject.batch, watched=True)
        except Exception as error:
            Refusal.of(error, run.task.modules)
            break
        if judge(phase, Mode.of(run), true, moved, step).is_healthy:
            break
        more = find_culprits(true.results, step.results, moved.results)
        if all(one.module in modules for one in more):
            break
        found += [one for one in more if one.module not in modules]
    return found


def refused(name: str, mode: Mode, true: Step, refusal: Refusal) -> Examination:
    """Return the examination of a phase that raises in the mode and not in float32."""
    return Examination(
        phase=name,
        mode=mode.name,
        dtype=mode.dtype_name,
        scale=None,
        losses={key: (value, math.nan) for key, value in true.losses.items()},
        parameters=[],
        faults=[f"fine in float32, and in {mode.dtype_name} it raises {refusal.text}"],
        refusal=refusal,
        results=true.results,
    )


def faults_of(updates: Mapping[str, Effect], dtype: str) -> list[str]:
    """Return the faults of updates whose gradients are right."""
    bad = [name for name, effect in updates.items() if not effect.finite]
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return [f"the optimizer's update of {bad[0]}{more} is not finite in {dtype}"] if bad else []


class Verdict:
    """Answers quickly whether a changed configuration is healthy: the float32 steps are taken once."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.tried = 0
        reference = subject.build_reference()
        self.true = [take_step(reference, phase, subject.batch) for phase in reference.phases]
        self.moved: dict[torch.dtype, list[Step]] = {}
        self.reference = reference

    def is_healthy(self, config: Config) -> bool:
        """Take the steps of a configuration and judge them."""
        self.tried += 1
        run = self.subject.build(config)
        dtype = run.precision.numerics.dtype
        if dtype not in self.moved:
            self.moved[dtype] = [
                rounded_step(self.reference, phase, self.subject.batch, dtype)
                for phase in self.reference.phases
            ]
        scales = []
        for phase, true, moved in zip(run.phases, self.true, self.moved[dtype], strict=True):
            try:
                step = take_step(run, phase, self.subject.batch)
            except Exception as error:
                Refusal.of(error, run.task.modules)
                return False
            if not judge(phase.name, Mode.of(run), true, moved, step).is_healthy:
                return False
            scales.append(step.scale)
        return all(
            bool(torch.isfinite(value).all())
            for phase, scale in zip(run.phases, scales, strict=True)
            for value in moves(run, phase, self.subject.batch, scale).values()
        )


def judge(name: str, mode: Mode, true: Step, moved: Step, step: Step) -> Examination:
    """Compare the mode's step with the float32 one and report the faults."""
    found = Examination(
        phase=name,
        mode=mode.name,
        dtype=mode.dtype_name,
        scale=step.scale,
        losses={key: (true.losses[key], step.losses.get(key, math.nan)) for key in true.losses},
        parameters=compare_gradients(true, moved, step),
        rounds_weights=mode.rounds_weights,
        results=true.results,
        seen=step.results,
        by_cuda_lists=step.by_cuda_lists,
        broken_gradients=non_finite_gradients(true) if true.has_overflowed else [],
    )
    looks = (
        loss_faults(found, moved),
        gradient_faults(found, step),
        buffer_faults(found, true, moved, step),
    )
    # what comes later follows from what came before
    found.faults.extend(next(filter(None, map(list, looks)), ()))
    return found


def loss_faults(found: Examination, moved: Step) -> Iterator[str]:
    """Yield what is wrong with losses."""
    for key, (right, value) in found.losses.items():
        name = f"{found.phase}/{key}"
        if not math.isfinite(right):
            yield f"{name} is not finite in float32 either: no precision mode mends that"
        elif not math.isfinite(value):
            yield f"{name} is {value:g} in {found.dtype} and {right:.4g} in float32"
        elif is_beyond(relative(value, right), relative(moved.losses[key], right), LARGE_LOSS):
            yield f"{name} is {value:.4g} in {found.dtype} and {right:.4g} in float32"


def gradient_faults(found: Examination, step: Step) -> Iterator[str]:
    """Yield what is wrong with gradients: that they are not finite, or those that are wrong."""
    if found.broken_gradients:
        more = (
            f" (and {len(found.broken_gradients) - 1} more)"
            if len(found.broken_gradients) > 1
            else ""
        )
        yield (
            f"the gradient of {found.broken_gradients[0]}{more} is not finite in float32 either: no precision mode "
            "mends that"
        )
    elif not step.is_finite:
        yield f"gradients are not finite in {found.dtype}" + _at_scale(step.scale)
    else:
        for one in found.parameters:
            if one.share >= SMALLEST_SHARE and is_beyond(
                one.error, one.from_rounding, LARGE_GRADIENT
            ):
                yield (
                    f"the gradient of {one.name} is wrong by {one.error:.0%} in {found.dtype} "
                    f"({one.from_rounding:.1%} would be rounding)" + _at_scale(step.scale)
                )


def buffer_faults(found: Examination, true: Step, moved: Step, step: Step) -> Iterator[str]:
    """Yield what is wrong with buffers."""
    for key, buffer in step.buffers.items():
        if not bool(torch.isfinite(buffer).all()):
            yield f"buffer {key} is not finite in {found.dtype}"
        if not key.endswith("running_var"):  # a mean may be zero, of which any rounding is far off
            continue
        error, rounding = (
            error_of(buffer, true.buffers[key]),
            error_of(moved.buffers[key], true.buffers[key]),
        )
        if is_beyond(error, rounding, LARGE_BUFFER):
            yield f"buffer {key} is wrong by {error:.0%} in {found.dtype}"


def non_finite_gradients(step: Step) -> list[str]:
    """Return the parameters whose gradients are not finite."""
    return [
        name
        for name, gradient in step.gradients.items()
        if not bool(torch.isfinite(gradient).all())
    ]


def _at_scale(scale: float | None) -> str:
    return "" if scale is None else f" at a loss scale of {scale:g}"


def relative(value: float, true: float) -> float:
    """Return a relative error."""
    return abs(value - true) / abs(true) if true else (math.inf if value else 0.0)


def is_beyond(error: float, rounding: float, limit: float) -> bool:
    """Return whether an error is large, and more than rounding explains."""
    return math.isnan(error) or (error > limit and error > BEYOND_ROUNDING * rounding)


def compare_gradients(true: Step, moved: Step, step: Step) -> list[ParameterError]:
    """Return the errors of all gradients, in the networks' order."""
    total = math.sqrt(sum(float(value.norm()) ** 2 for value in true.gradients.values()))
    errors = []
    for name, right in true.gradients.items():
        value = step.gradients.get(name, torch.zeros_like(right))
        norms = float(right.norm()) * float(value.norm())
        errors.append(
            ParameterError(
                name=name,
                error=error_of(value, right),
                from_rounding=error_of(moved.gradients.get(name, right), right),
                cosine=float((right.flatten() @ value.flatten()) / norms) if norms else math.nan,
                share=float(right.norm()) / total if total else 0.0,
            )
        )
    return errors


def operator_errors(
    true: Sequence[Result], seen: Sequence[Result]
) -> Iterator[tuple[Result, float]]:
    """Yield each operator of the float32 step with the error of its result in the mode, if both have it."""
    by_key = {one.key: one for one in seen}
    for one in true:
        other = by_key.get(one.key)
        if other is not None and other.shape == one.shape:
            yield one, result_error(other, one)
