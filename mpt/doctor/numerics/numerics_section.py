"""The numerics of a model in words and tables: faults with their cure, and each module's distance to float16's ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from mpt.config.options import STABLE_FORMS
from mpt.doctor.findings import Section
from mpt.doctor.measuring.instrument import Result
from mpt.doctor.numerics.cure import Cure, find_cure, patched
from mpt.doctor.numerics.numerics import Examination, examine
from mpt.doctor.numerics.numerics_tables import (
    exponents_of,
    operator_rows,
    parameter_rows,
    ranges_of,
)
from mpt.doctor.numerics.rewrites import NAMED_WHEN_HEALTHY, find_places
from mpt.doctor.numerics.subject import Subject
from mpt.errors import ConfigError

LITTLE_HEADROOM = 3.0
"""Bits to overflow below which a module is named."""
MUCH_UNDERFLOW = 0.25
"""Share of a gradient that float16 would lose, with the loss scale, above which a module is named."""
STILL, ARRIVED = 0.5, 0.5
"""More weights that do not move, and less of the update, than this is a warning."""
KEEP_SAFE = "watch it: precision.keep_fp32 would keep it safe"
LARGER_SCALE = "a larger precision.init_scale, where it does not overflow"
KEEP_WEIGHTS = (
    "a mode that keeps float32 weights (amp, bf16, O2), bf16-sr, bf16-kahan, fp16-24bit; "
    "or a larger optimizer.lr"
)
MOST_FAULTS = 3
MOST_PLACES = 6
MOST_NEAR = 3
MOST_SAMPLES = 8


def describe_numerics(*points: Subject) -> Section:
    """Examine the step of a configuration, at one or several points of its training, and look for the cure.

    The cure is one for all points: it is searched at the first that is wrong, and added to if that does not suffice.
    """
    section = Section("numerics")
    section.tables["exponents"] = []
    last = points[-1]
    patch: dict[str, Any] = {}
    said: list[str] = []
    trials = 0
    for point in points:
        try:
            subject, found = examine_with_stable_reference(point)
        except ConfigError as error:
            section.add("fault", "configuration", str(error))
            return section
        for one in found:
            describe_phase(section, one, subject, many=len(points) > 1, is_last=point is last)
        if subject.reference_forms:
            text = "as written the step is not finite in float32 either; compared with float32 by stable forms"
            section.add("note", "reference", text)
        if all(one.is_healthy for one in found):
            continue
        changed = (
            dataclasses.replace(subject, config=patched(subject.config, patch))
            if patch
            else subject
        )
        if patch:
            found = examine(changed)
        faulty = [one for one in found if not one.is_healthy]
        cure = find_cure(changed, faulty) if faulty else None
        if cure is not None:
            patch = {
                key: {**patch.get(key, {}), **cure.patch.get(key, {})}
                for key in (*patch, *cure.patch)
            }
            trials += cure.trials
            said.append(cure.describe())
            name_places(section, cure)
        elif faulty:
            is_formula = not all(one.is_finite_in_float32 for one in faulty)
            advice = "mend the model or the loss" if is_formula else "use precision=bf16 or fp32"
            section.add("warning", "cure", "none was found that helps", advice)
            return section
    if section.worst != "fault":
        note_poor_forms(section, last)
    if patch:
        text = "; at a later point also: ".join(said)
        section.add(
            "note", "cure", f"{text}; {trials} {'step was' if trials == 1 else 'steps were'} tried"
        )
        section.tables["cure"] = [{"cure": text, "patch": patch}]
    return section


def examine_with_stable_reference(subject: Subject) -> tuple[Subject, list[Examination]]:
    """Examine a step against float32, by stable forms if only they make float32's own loss finite.

    Return also the subject with the forms of the reference that was used. Raises ConfigError for anything that does not
    build.
    """
    found = examine(subject)
    if not all(one.is_finite_in_float32 for one in found):
        stable = dataclasses.replace(subject, reference_forms=STABLE_FORMS)
        try:
            again = examine(stable)
        except ConfigError:  # refused together with another setting: a compiled network
            return subject, found
        if all(one.is_finite_in_float32 for one in again):
            return stable, again
    return subject, found


class Examined(Protocol):
    """A subject as far as findings name it."""

    @property
    def step(self) -> int:
        """How far it is trained."""

    @property
    def batch_size(self) -> int:
        """Samples of the step; 0 if that is not known."""

    @property
    def indices(self) -> Sequence[int]:
        """Where the batch's samples are in the data set, if that is known."""


def describe_culprit(culprit: Result, subject: Examined) -> str:
    """Return the operator that is to blame, its inputs, and the samples that were not finite."""
    text = culprit.describe()
    if culprit.inputs:
        text += f"; its inputs go from {culprit.describe_inputs()}"
    size = subject.batch_size
    bad = culprit.bad_samples(size)
    if bad:
        more = f" and {len(bad) - MOST_SAMPLES} more" if len(bad) > MOST_SAMPLES else ""
        text += f"; samples {', '.join(map(str, bad[:MOST_SAMPLES]))}{more} of the batch of {size}"
        if subject.indices:
            text += f" (of the data set: {', '.join(str(subject.indices[one]) for one in bad[:MOST_SAMPLES])})"
    return text


def describe_phase(
    section: Section, found: Examination, subject: Examined, *, many: bool, is_last: bool
) -> None:
    """Add what was found about a phase: faults with their operators, or the accuracy, and its rows of the tables."""
    step, scale = subject.step, found.scale or 1.0
    about = f"phase {found.phase}" + (f", step {step}" if many else "")
    _add_faults(section, about, found, subject)
    if found.is_healthy:
        section.add("ok", about, _accuracy(found))
        describe_updates(section, about, found)
    if is_last:
        _add_last(section, about, found)
    rows = {
        "exponents": exponents_of(found.phase, step, found.results, scale),
        "parameters": parameter_rows(found, step),
        "operators": operator_rows(found, step),
        "ranges": [{"step": step, **row} for row in ranges_of(found.phase, found.results, scale)],
    }
    for name, added in rows.items():
        section.tables.setdefault(name, []).extend(added)


def _add_faults(section: Section, about: str, found: Examination, subject: Examined) -> None:
    """Add the faults, with the operators that are to blame."""
    for text in found.faults[:MOST_FAULTS]:
        where = (
            f"first wrong operator: {describe_culprit(found.culprits[0], subject)}"
            if found.culprits
            else ""
        )
        where = found.refusal.describe() if found.refusal is not None else where
        section.add("fault", about, text, where)
    for culprit in found.culprits[1:MOST_PLACES]:
        section.add(
            "fault", about, f"wrong independently of that: {describe_culprit(culprit, subject)}"
        )


def _accuracy(found: Examination) -> str:
    """Return how far the gradients are from the reference's, of parameters that have a share in them."""
    scale = "" if found.scale is None else f", loss scale {found.scale:g}"
    counted = [one for one in found.parameters if one.share > 1e-3]
    worst = max((one.error for one in counted), default=0.0)
    lowest = min((one.cosine for one in counted), default=1.0)
    return f"{found.mode} in {found.dtype}{scale}: gradients are off by {worst:.1%} at most, cosine {lowest:.4f}"


def _add_last(section: Section, about: str, found: Examination) -> None:
    """Add the findings about the last step: decay that is lost, operators in float32, modules near the ends."""
    for text in found.lost_decay:
        section.add("warning", about, text)
    if found.by_cuda_lists:
        names = ", ".join(found.by_cuda_lists)
        were = "was" if len(found.by_cuda_lists) == 1 else "were"
        said = f"{names} {were} computed in float32, as CUDA's autocast does and a CPU's does not"
        section.add("note", about, said)
    if found.dtype == "float16":
        note_ranges(section, about, found)


def note_ranges(section: Section, about: str, found: Examination) -> None:
    """Name the modules that come near float16's ends, as far as the mode computes them in it; the table has all."""
    half = {one.key for one in found.seen if one.dtype == torch.float16}
    results = [one for one in found.results if one.key in half or not found.seen]
    near: dict[str, float] = {}
    small: dict[str, float] = {}
    for row in ranges_of(found.phase, results, found.scale or 1.0):
        if row["module"] == "the loss":
            continue
        if (
            row["forward_headroom_bits"] is not None
            and row["forward_headroom_bits"] < LITTLE_HEADROOM
        ):
            near[row["module"]] = row["forward_headroom_bits"]
        if row["gradient_underflow"] > MUCH_UNDERFLOW:
            small[row["module"]] = row["gradient_underflow"]
    note_little_headroom(section, about, near)
    note_small_gradients(section, about, small)


def note_little_headroom(section: Section, about: str, near: Mapping[str, float]) -> None:
    """Note the modules whose results come near float16's largest number, the nearest first; many in one line."""
    order = sorted(near, key=lambda name: near[name])
    others = len(order) - MOST_NEAR
    for number, name in enumerate(order[:MOST_NEAR], 1):
        bits = near[name]
        place = f"comes within {bits:.1f} bits of" if bits > 0 else f"lies {-bits:.1f} bits beyond"
        more = (
            f", and {others} more modules are near it or beyond"
            if others > 0 and number == MOST_NEAR
            else ""
        )
        text = f"{name} {place} float16's largest number{more}"
        section.add("note", about, text, KEEP_SAFE)


def note_small_gradients(section: Section, about: str, small: Mapping[str, float]) -> None:
    """Note the modules of which many gradients are zero in float16, in one line: they have one cause."""
    if not small:
        return
    names = ", ".join(list(small)[:MOST_PLACES]) + (", ..." if len(small) > MOST_PLACES else "")
    low, high = f"{min(small.values()):.0%}", f"{max(small.values()):.0%}"
    shares = low if low == high else f"{low} to {high}"
    where = names if len(small) == 1 else f"{len(small)} modules ({names})"
    text = f"{shares} of the gradients in {where} are too small for float16"
    section.add("note", about, text, LARGER_SCALE)


def name_places(section: Section, cure: Cure) -> None:
    """List the lines whose forms a cure replaces: an edit of them does as well as the setting."""
    rows = section.tables.setdefault("stable forms", [])
    rows += [{**place.to_record(), "tried": True} for place in cure.places]
    for place in cure.places[:MOST_PLACES]:
        section.add("note", "stable form", place.describe())
    if cure.instead:
        section.add("note", "cure", cure.instead)


def note_poor_forms(section: Section, subject: Subject) -> None:
    """Name the lines that will lose precision once a model is sure of itself, although they do not now."""
    places = [place for place in find_places(subject) if place.form in NAMED_WHEN_HEALTHY]
    if places:
        section.tables["stable forms"] = [{**place.to_record(), "tried": False} for place in places]
    for place in places[:MOST_PLACES]:
        setting = f"or set precision.stable_forms=[{place.form}], without an edit"
        advice = f"{setting}; the form does no harm yet at this point of the training"
        section.add("note", "poor form", place.describe(), advice)


def describe_updates(section: Section, about: str, found: Examination) -> None:
    """Warn of weights that the mode's updates leave as they are: too short to reach the next number."""
    still = [
        name for name, one in found.updates.items() if one.still > STILL and one.arrived < ARRIVED
    ]
    if not still or not found.rounds_weights:
        return
    worst = min(still, key=lambda name: found.updates[name].arrived)
    effect = found.updates[worst]
    more = f", and {len(still) - 1} more parameters are like it" if len(still) > 1 else ""
    section.add(
        "warning",
        about,
        f"{effect.still:.0%} of {worst} stay as they are in {found.dtype}, as the update is rounded away: "
        f"{effect.arrived:.0%} of it arrives{more}",
        KEEP_WEIGHTS,
    )
