"""The numerics of somebody's own step: what its autocast, or half weights, lose; the place, and lines that cure it.

The judgement is that of a configuration (`mpt.doctor.numerics.numerics`): the step in float32, the step as it is, and a
float32 step moved by rounding. The cure is lines for the script, each tried: a loss scale, stable forms, modules in
float32, bfloat16. A step that computes in float32 is examined with autocast added; what is found then is no fault of
the script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mpt.config.options import STABLE_FORMS
from mpt.doctor.findings import Finding, Level, Section
from mpt.doctor.measuring.culprits import find_culprits
from mpt.doctor.measuring.refusals import Refusal
from mpt.doctor.measuring.weight_updates import effects
from mpt.doctor.numerics.cure import DEFAULT_SCALE, blamed_modules
from mpt.doctor.numerics.numerics import Examination, Mode, faults_of, judge, refused
from mpt.doctor.numerics.numerics_section import (
    KEEP_SAFE,
    KEEP_WEIGHTS,
    LARGER_SCALE,
    MOST_PLACES,
    describe_phase,
)
from mpt.doctor.numerics.rewrites import Place, fewest_forms
from mpt.doctor.own.arithmetic import Arithmetic
from mpt.doctor.own.loss_scales import SMALLEST_EXPONENT, expected_exponent, largest_finite
from mpt.doctor.own.step import OwnSubject, Taken, take
from mpt.engine.recovery.smallest_list import smallest_list

ADVICE = {
    KEEP_SAFE: 'watch it: torch.autocast("cuda", enabled=False) around it, on inputs.float(), would keep it safe',
    LARGER_SCALE: "a larger init_scale of the GradScaler, where it does not overflow",
    KEEP_WEIGHTS: "keep float32 weights and use torch.autocast; or a larger learning rate",
}
"""What is advised of a configuration -> of a script."""
SCALER = "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()  # of a torch.amp.GradScaler()"


class OwnVerdict:
    """Judges the steps of a script by its float32 step, which is taken once."""

    def __init__(self, subject: OwnSubject, dtype: torch.dtype | None = None) -> None:
        """`dtype` is that of the script's autocast in place of its own."""
        self.subject = subject
        self.tried = 0
        self.steps = 0
        self.true = self.finished(Arithmetic(torch.float32), watched=True)
        self.expected = expected_exponent(self.true.phases.values())
        self.has_half, again = bool(self.true.seen.asked), None
        if not self.has_half:  # as it is, a script that computes in float32 repeats that step
            again = self.take(Arithmetic(dtype))
            self.has_half = again.error is not None or again.seen.dtype != torch.float32
        if again is None or self.has_half:
            again = self.finished(Arithmetic(torch.float32))
        self.repeats = all(
            are_same(step.losses, again.phases[name].losses) if name in again.phases else False
            for name, step in self.true.phases.items()
        )
        self._moved: dict[tuple[torch.dtype, bool], Taken] = {}

    def take(self, how: Arithmetic, *, forms: Sequence[str] = (), **options: Any) -> Taken:
        """Take a step, and say which."""
        self.steps += 1
        cure = f"possible cure {self.tried}: " if self.tried else ""
        self.subject.tell(f"step {self.steps}, {cure}{how.describe(forms)}")
        return take(self.subject, how, forms=forms, **options)

    def finished(self, how: Arithmetic, *, watched: bool = False) -> Taken:
        """Take a step that comes to its end. Raises what it raised."""
        taken = self.take(how, watched=watched)
        if taken.error is not None:
            raise taken.error
        return taken

    def moved(self, dtype: torch.dtype, *, watched: bool = False) -> Taken:
        """Return the float32 step with weights and inputs moved by a dtype's rounding."""
        key = dtype, watched
        if key not in self._moved:
            how = Arithmetic(torch.float32, moved=torch.finfo(dtype).eps / 2)
            self._moved[key] = self.finished(how, watched=watched)
        return self._moved[key]

    def at_best_scale(
        self,
        how: Arithmetic,
        *,
        watched: bool = False,
        forms: Sequence[str] = (),
        is_enough: Callable[[Taken], bool] = lambda taken: False,
    ) -> Taken:
        """Take a step at the largest power of two as its loss scale, from the initial one down, that is finite.

        Or at the first one that is tried if that is enough.
        """
        if how.adds_scaler and how.scale is None:
            how = replace(how, scale=DEFAULT_SCALE)
        seen = self.true.seen
        scale = how.scale if how.adds_scaler else seen.initial_scale
        dtypes = {how.dtype} if how.dtype else seen.asked | seen.named
        if scale is None or torch.float16 not in dtypes:
            return self.take(how, watched=watched, forms=forms)

        highest = math.floor(math.log2(scale))
        begin = min(highest, max(SMALLEST_EXPONENT, self.expected or highest))

        def at(exponent: int, *, watched: bool = False) -> Taken:
            one = how if exponent == highest else replace(how, scale=2.0**exponent)
            return self.take(one, watched=watched, forms=forms)

        first = kept = at(begin, watched=watched)  # watched, since it is the best one in most cases
        if not is_scaled_alone(first) or is_enough(first):
            return first

        def is_finite(exponent: int) -> bool:
            nonlocal kept
            taken = first if exponent == begin else at(exponent)
            if not overflows(taken):
                kept = taken
            return not overflows(taken)

        found = largest_finite(begin, highest, is_finite)
        if found is not None and not self.tried:
            self.expected = found
        if found is None:
            return at(highest, watched=watched)
        return kept if kept is first or not watched else at(found, watched=True)

    def examine(self, taken: Taken, how: Arithmetic) -> list[Examination]:
        """Compare each phase of a step with the float32 one."""
        dtype = taken.seen.dtype
        names = ["autocast"] * bool(taken.seen.autocast) + ["half weights"] * bool(
            taken.seen.half_weights
        )
        mode = Mode(" and ".join(names) or "float32", dtype, bool(taken.seen.half_weights))
        moved, found = self.moved(dtype), []
        for name, true in self.true.phases.items():
            step = taken.phases.get(name)
            if step is None:
                error = taken.error or RuntimeError("its optimizer took no step")
                found.append(refused(name, mode, true, Refusal.of(error, taken.modules)))
                break
            one = judge(name, mode, true, moved.phases[name], step)
            if one.is_healthy:
                one.updates = effects(self.true.moves.get(name, {}), taken.moves.get(name, {}))
                one.faults += faults_of(one.updates, one.dtype)
            elif step.results:
                watched = self.moved(dtype, watched=True).phases[name]
                one.culprits = find_culprits(true.results, step.results, watched.results)
            found.append(one)
        return found

    def is_healthy(self, how: Arithmetic, forms: Sequence[str] = ()) -> bool:
        """Return whether nothing is wrong with a step."""
        self.tried += 1

        def is_right(taken: Taken) -> bool:
            return taken.error is None and all(one.is_healthy for one in self.examine(taken, how))

        return is_right(self.at_best_scale(how, forms=forms, is_enough=is_right))


def is_scaled_alone(taken: Taken) -> bool:
    """Return whether a smaller or larger loss scale may change a step: it came to its end with finite losses."""
    losses = [value for step in taken.phases.values() for value in step.losses.values()]
    return taken.error is None and all(map(math.isfinite, losses))


def overflows(taken: Taken) -> bool:
    """Return whether gradients of any phase are not finite although its losses are."""
    return any(step.has_overflowed for step in taken.phases.values())


def are_same(one: dict[str, float], other: dict[str, float]) -> bool:
    """Return whether losses are equal; one that is not finite equals any such."""
    return one.keys() == other.keys() and all(
        math.isclose(value, other[name], rel_tol=1e-5) or not math.isfinite(value)
        for name, value in one.items()
    )


@dataclass(frozen=True)
class OwnCure:
    """Lines for a script with which its step was seen to be right."""

    lines: tuple[str, ...]
    text: str


def describe_own(subject: OwnSubject, dtype: torch.dtype | None = None) -> Section:
    """Examine a step and look for lines that cure it; `dtype` is that of its autocast in place of its own."""
    section = Section("numerics")
    verdict = OwnVerdict(subject, dtype)
    if not verdict.repeats:
        text = "two float32 steps from the same seeds differ, so that the precision's share in a difference is unknown"
        section.add(
            "warning",
            "step",
            text,
            "its data or random numbers do not follow the seeds of torch and numpy",
        )
        return section
    how, has_half = Arithmetic(dtype), verdict.has_half
    if not has_half:
        tried = dtype if dtype not in (None, torch.float32) else torch.float16
        has_scaler = verdict.true.seen.has_scaler
        how = Arithmetic(
            tried, adds_autocast=True, adds_scaler=tried == torch.float16 and not has_scaler
        )
    plain = verdict.at_best_scale(how, watched=True)
    if not has_half:
        name = str(tried).removeprefix("torch.")
        text = f"the script computes in float32; {name} was tried with autocast added"
        section.add("note", "precision", text)
    found = verdict.examine(plain, how)
    for one in found:
        describe_phase(section, one, subject, many=False, is_last=True)
    if any(not one.is_healthy for one in found):
        if all(one.is_finite_in_float32 for one in found):
            add_cure(section, find_own_cure(verdict, how, plain, found), verdict.tried)
        else:
            section.add(
                "warning", "cure", "none was found that helps", "mend the model or the loss"
            )
    elif not has_half:
        lines = [
            f'with torch.autocast("cuda", {how.dtype}):  # around forward and loss',
            SCALER * how.adds_scaler,
        ]
        section.tables["lines"] = [{"line": line} for line in lines if line]
    section.findings = [of_script(one, has_half=has_half) for one in section.findings]
    return section


def of_script(finding: Finding, *, has_half: bool) -> Finding:
    """Return a finding in the words of scripts; a fault of a precision that the script has not is a warning."""
    level: Level = "warning" if finding.level == "fault" and not has_half else finding.level
    return replace(finding, level=level, advice=ADVICE.get(finding.advice, finding.advice))


def add_cure(section: Section, cure: OwnCure | None, trials: int) -> None:
    """Add the lines of a cure, or that there is none."""
    if cure is None:
        section.add("warning", "cure", "none was found that helps", "compute the step in float32")
        return
    section.add(
        "note", "cure", f"{cure.text}; {trials} {'step was' if trials == 1 else 'steps were'} tried"
    )
    for line in cure.lines:
        section.add("note", "to write", line)
    section.tables["lines"] = [{"line": line} for line in cure.lines]


def find_own_cure(
    verdict: OwnVerdict, how: Arithmetic, plain: Taken, found: Sequence[Examination]
) -> OwnCure | None:
    """Return the smallest change of a script that was seen to help, or None."""
    dtype = plain.seen.dtype
    is_unscaled = dtype == torch.float16 and not (plain.seen.has_scaler or how.adds_scaler)
    if is_unscaled and verdict.is_healthy(replace(how, adds_scaler=True)):
        return OwnCure((SCALER,), "scale the loss: gradients are lost in float16 without")
    culprits = [culprit for one in found for culprit in one.culprits]
    places: dict[Place, None] = {}
    verdict.take(how, forms=STABLE_FORMS, on_form=lambda place: places.setdefault(place))
    forms = (
        fewest_forms(list(places), culprits, lambda some: verdict.is_healthy(how, some))
        if places
        else None
    )
    if forms is not None:
        chosen = [place for place in places if place.form in forms]
        lines = tuple(place.describe() for place in chosen[:MOST_PLACES])
        return OwnCure(lines, f"compute {', '.join(forms)} by a stable form")
    if plain.seen.autocast and verdict.is_healthy(replace(how, only_networks=dtype)):
        line = "the loss outside of torch.autocast, on the network's outputs.float()"
        return OwnCure((line,), "compute the loss in float32")
    if plain.seen.autocast:
        blamed = blamed_modules(found)
        kept = smallest_list(
            plain.modules,
            blamed,
            lambda names: verdict.is_healthy(replace(how, float32_modules=tuple(names))),
        )
        if kept is not None:
            lines = tuple(
                f'{name}: call it within torch.autocast("cuda", enabled=False), on inputs.float()'
                for name in kept.modules
            )
            return OwnCure(lines, f"keep {', '.join(kept.modules)} in float32 ({kept.describe()})")
    may_widen = dtype == torch.float16 and plain.seen.autocast
    if may_widen and verdict.is_healthy(replace(how, dtype=torch.bfloat16, adds_scaler=False)):
        line = 'torch.autocast("cuda", torch.bfloat16), without a GradScaler'
        return OwnCure(
            (line,), "use bfloat16: float16's range is too small here, and no list of modules helps"
        )
    return None
