"""The smallest change that makes a mode healthy: modules to keep in float32, or another dtype.

Tried in this order, and everything that is offered was tried: the fewest modules (`mpt.engine.smallest_list`);
bfloat16, which has float32's range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpt.doctor.numerics import Examination, Subject, Verdict, as_on_a_gpu, with_float32
from mpt.engine.module_places import LOSS
from mpt.engine.smallest_list import SmallestList, smallest_list


@dataclass(frozen=True)
class Cure:
    """A patch that was tried and makes the step healthy."""

    patch: dict[str, Any]
    kept: SmallestList | None
    """What it keeps in float32; None where it chooses another dtype."""
    trials: int

    def describe(self) -> str:
        """Return the cure in words."""
        if self.kept is None:
            return "use bfloat16: float16's range is too small here, and no list of modules helps"
        return f"keep {', '.join(self.kept.modules)} in float32 ({self.kept.describe()})"


def find_cure(subject: Subject, found: Sequence[Examination]) -> Cure | None:
    """Return the smallest change that was seen to help, or None. Call for an examination with faults."""
    verdict = Verdict(subject)
    already = subject.config.precision.settings.keep_fp32

    def helps(modules: Sequence[str]) -> bool:
        return verdict.is_healthy(with_float32(subject.config, modules))

    blamed = list(dict.fromkeys(one.culprit.module for one in found if one.culprit is not None))
    kept = smallest_list(verdict.reference.task.modules, [name for name in blamed if name != LOSS], helps)
    if kept is not None:
        return Cure({"precision": {"keep_fp32": [*already, *kept.modules]}}, kept, verdict.tried)
    lower = as_on_a_gpu(subject.config, "bfloat16")
    if lower.to_data() != subject.config.to_data() and verdict.is_healthy(lower):
        return Cure({"precision": {"dtype": "bfloat16"}}, None, verdict.tried)
    return None
