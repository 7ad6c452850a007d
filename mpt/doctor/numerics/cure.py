"""The smallest change that makes a mode healthy: modules to keep in float32, or another dtype.

Tried in this order, and everything that is offered was tried: one setting that the configuration has otherwise than the
default (a loss scale that cannot move or begins low, losses that are not computed in float32); stable forms of the
calls that the model or a loss computes in a poor one (`mpt.doctor.numerics.rewrites`) or the fewest modules
(`mpt.engine.recovery.smallest_list`), whichever are fewer, and the forms if they are as many, for they cost no
speed; bfloat16, which has float32's range.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpt.config.options import PrecisionOptions
from mpt.config.schema import Config
from mpt.doctor.numerics.numerics import Examination, Verdict
from mpt.doctor.numerics.rewrites import Place, find_places, smallest_forms
from mpt.doctor.numerics.subject import Subject, as_on_a_gpu, with_float32
from mpt.engine.recovery.smallest_list import SmallestList, smallest_list
from mpt.nn.shared.module_places import LOSS


@dataclass(frozen=True)
class Cure:
    """A patch that was tried and makes the step healthy."""

    patch: dict[str, Any]
    kept: SmallestList | None
    """The modules that it keeps in float32; None if it changes something else."""
    trials: int
    places: tuple[Place, ...] = ()
    """The places of the forms that it replaces."""
    instead: str = ""
    """Alternatives that helped as well."""

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms that it replaces."""
        return tuple(dict.fromkeys(place.form for place in self.places))

    def describe(self) -> str:
        """Return the cure in words."""
        if self.kept is not None:
            return f"keep {', '.join(self.kept.modules)} in float32 ({self.kept.describe()})"
        if "dtype" in self.patch.get("precision", {}):
            return "use bfloat16: float16's range is too small here, and no list of modules helps"
        if self.places:
            lines = dict.fromkeys(place.line for place in self.places)
            return f"compute {', '.join(self.forms)} by stable forms at {', '.join(lines)}"
        changes = [
            f"{section}.{name}={value}"
            for section, own in self.patch.items()
            for name, value in own.items()
        ]
        return f"set {', '.join(changes)}"


DEFAULT_SCALE: float = PrecisionOptions.model_fields["init_scale"].default


def find_cure(subject: Subject, found: Sequence[Examination]) -> Cure | None:
    """Return the smallest change that was seen to help, or None. Call for an examination with faults."""
    verdict = Verdict(subject)
    already = subject.config.precision.settings.keep_fp32

    def helps(modules: Sequence[str]) -> bool:
        return verdict.is_healthy(with_float32(subject.config, modules))

    for patch in single_settings(subject.config):
        if verdict.is_healthy(patched(subject.config, patch)):
            return Cure(patch, None, verdict.tried)
    culprits = [culprit for one in found for culprit in one.culprits]
    blamed = blamed_modules(found)
    places = find_places(subject)
    forms = smallest_forms(subject, verdict, places, culprits) if places else None
    if forms is not None and len(forms) == 1:  # no list is smaller
        kept = SmallestList(tuple(blamed), True, 1) if len(blamed) == 1 and helps(blamed) else None
    else:
        kept = smallest_list(verdict.reference.task.modules, blamed, helps)
    if forms is not None and (kept is None or len(forms) <= len(kept.modules)):
        own = [*subject.config.precision.settings.stable_forms, *forms]
        chosen = tuple(place for place in places if place.form in forms)
        also = (
            f"precision.keep_fp32: [{', '.join(kept.modules)}] helps as well"
            if kept is not None
            else ""
        )
        return Cure({"precision": {"stable_forms": own}}, None, verdict.tried, chosen, also)
    if kept is not None:
        return Cure({"precision": {"keep_fp32": [*already, *kept.modules]}}, kept, verdict.tried)
    lower = as_on_a_gpu(subject.config, "bfloat16")
    if lower.to_data() != subject.config.to_data() and verdict.is_healthy(lower):
        return Cure({"precision": {"dtype": "bfloat16"}}, None, verdict.tried)
    return None


def blamed_modules(found: Sequence[Examination]) -> list[str]:
    """Return the modules of wrong operators and of refused ones, each once; losses are none."""
    wrong = [culprit.module for one in found for culprit in one.culprits]
    refused = [one.refusal.module for one in found if one.refusal is not None]
    return [name for name in dict.fromkeys([*wrong, *refused]) if name not in (LOSS, "")]


def single_settings(config: Config) -> Iterator[dict[str, Any]]:
    """Yield the patches of one setting that are worth a trial before any module is kept in float32."""
    settings = config.precision.settings
    if isinstance(settings.loss_scale, float):
        yield {"precision": {"loss_scale": "dynamic"}}
    elif settings.init_scale < DEFAULT_SCALE:
        yield {"precision": {"init_scale": DEFAULT_SCALE}}
    if settings.losses == "inherit":
        yield {"precision": {"losses": "float32"}}


def patched(config: Config, patch: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return a configuration with the settings of a cure."""
    for name, changes in patch.items():
        choice = getattr(config, name)
        settings = choice.settings.model_copy(update=dict(changes))
        config = dataclasses.replace(
            config, **{name: dataclasses.replace(choice, settings=settings)}
        )
    return config
