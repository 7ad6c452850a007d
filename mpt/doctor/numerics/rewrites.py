"""The numerically poor forms that a step computes, their places, and the fewest whose stable forms make the step right.

The forms are those of `precision.stable_forms`. They are found by taking the step with all of them replaced; every
form that is offered was tried, each alone first, and the fewest together otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpt.config.options import STABLE_FORMS
from mpt.doctor.measuring.instrument import Result
from mpt.doctor.measuring.measured_step import take_step
from mpt.doctor.measuring.refusals import Refusal
from mpt.doctor.numerics.numerics import Verdict
from mpt.doctor.numerics.subject import Subject, with_stable_forms
from mpt.engine.recovery.smallest_list import fewest
from mpt.errors import ConfigError
from mpt.nn.shared.module_places import LOSS, module_places, source_line
from mpt.precision.stable.stable_forms import StableForms
from mpt.precision.stable.stable_logs import Rewrite

MOST_TRIALS = 16
NAMED_WHEN_HEALTHY = ("log", "cross_entropy", "epsilon")
"""Forms that are worth a note though nothing is wrong yet: they fail once a model is sure of itself."""


@dataclass(frozen=True)
class Place:
    """One place at which a poor form is computed."""

    form: str
    """Its name in `precision.stable_forms`."""
    module: str
    line: str
    """The user's own line on which the form ends."""
    was: str
    instead: str

    def describe(self) -> str:
        """Return the place and the replacement, in words."""
        return f"{self.line} ({self.module}): write {self.instead} instead of {self.was}"

    def to_record(self) -> dict[str, Any]:
        """Return the place as a row of a table."""
        return dataclasses.asdict(self)


def find_places(subject: Subject) -> list[Place]:
    """Take the step of each phase with every form replaced; return the places of those that the run leaves."""
    run = subject.build(subject.config)
    places: dict[Place, None] = {}
    with module_places(run.task.modules) as modules:

        def note(form: str, rewrite: Rewrite) -> None:
            places[
                Place(form, modules.current()[0], source_line(), rewrite.was, rewrite.instead)
            ] = None

        run = dataclasses.replace(run, stable_forms=StableForms(STABLE_FORMS, note))
        for phase in run.phases:
            try:
                take_step(run, phase, subject.batch)
            except (
                Exception
            ) as error:  # a step that raises in the mode: the forms reached before have been noted
                Refusal.of(error, run.task.modules)
    already = subject.config.precision.settings.stable_forms
    done = {place.line for place in places if place.form in already}
    return [place for place in places if place.line not in done]


def smallest_forms(
    subject: Subject, verdict: Verdict, places: Sequence[Place], culprits: Sequence[Result]
) -> list[str] | None:
    """Return the fewest forms whose replacement makes the step right, or None; those near the fault are tried first."""

    def helps(chosen: Sequence[str]) -> bool:
        try:
            return verdict.is_healthy(with_stable_forms(subject.config, chosen))
        except ConfigError:  # refused together with another setting: a compiled network
            return False

    return fewest_forms(places, culprits, helps)


def fewest_forms(
    places: Sequence[Place], culprits: Sequence[Result], helps: Callable[[Sequence[str]], bool]
) -> list[str] | None:
    """Return the fewest forms of some places that help, or None; each alone is tried first."""
    blamed = {one.line for one in culprits} - {""}
    near = {one.module for one in culprits} - {LOSS}
    order = sorted(
        places,
        key=lambda one: (
            one.line not in blamed,
            one.module not in near,
            STABLE_FORMS.index(one.form),
        ),
    )
    forms = list(dict.fromkeys(place.form for place in order))
    tried = 0

    def tries(chosen: Sequence[str]) -> bool:
        nonlocal tried
        tried += 1
        return helps(chosen)

    for form in forms:
        if tries([form]):
            return [form]
    if len(forms) < 2 or not tries(forms):
        return None
    return fewest(forms, tries, lambda: tried < MOST_TRIALS)[0]
