"""Changes that make room for an evaluation, samples or a preview that do not fit although the steps do.

Tricks that relieve "moments" (`mpt.config.relief`) change nothing of the steps, so they are no recipes of the search:
one is planned, with the whole run, only if something outside the steps does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpt.config.relief import reliefs
from mpt.config.schema import Config
from mpt.planner.answers.plan import Plan, PlannedMoment
from mpt.planner.client.session import Session
from mpt.planner.recipes.patches import patched


@dataclass(frozen=True)
class MadeRoom:
    """A change of the configuration, and the plan with it outside the steps."""

    patch: dict[str, Any]
    moments: dict[str, PlannedMoment]


def moments_that_do_not_fit(plan: Plan) -> list[str]:
    """Return the moments outside the steps that do not fit although the steps do."""
    return [name for name, moment in plan.moments.items() if plan.fits and moment.fits is False]


def make_room(
    session: Session, config: Config, plan: Plan, budget_bytes: int | None
) -> MadeRoom | None:
    """Return the first change with which more fits outside the steps than now; None if nothing is to be done."""
    before = moments_that_do_not_fit(plan)
    if not before or plan.ranks is not None:
        return None
    for trick in reliefs("moments"):
        if trick.name in config.memory.tricks or any(
            other in config.memory.tricks for other in trick.conflicts
        ):
            continue
        patch = {"memory": {trick.name: trick.proposals[0]}}
        changed = patched(config, patch, config.granted)
        found = session.plan([changed], budget_bytes=budget_bytes, whole_run=True)[0].found
        if found is not None and found.fits and len(moments_that_do_not_fit(found)) < len(before):
            return MadeRoom(patch, found.moments)
    return None
