"""Changes that make room for an evaluation, samples or a preview that do not fit although the steps do.

Tricks that relieve "moments" (`mpt.memory.relieving.relief`) change nothing of the steps, so they are no recipes of the
search: one is planned, with the whole run, only if something outside the steps does not fit. After them a smaller batch
is planned, which evaluations take too: first a batch of one sample, since what does not fit with that, such as weights
or cuBLAS's workspace, fits with none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpt.config.checking.layers import write_override
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.errors import ConfigError
from mpt.memory.relieving.relief import reliefs
from mpt.planner.answers.plan import RESUME, Plan, PlannedMoment
from mpt.planner.client.session import Session


@dataclass(frozen=True)
class MadeRoom:
    """A change of the configuration, and the plan with it outside the steps."""

    patch: dict[str, dict[str, Any]]
    moments: dict[str, PlannedMoment]

    @property
    def overrides(self) -> str:
        """The change as the command line takes it."""
        return " ".join(
            write_override(f"{section}.{name}", value)
            for section, settings in self.patch.items()
            for name, value in settings.items()
        )


def moments_that_do_not_fit(plan: Plan) -> list[str]:
    """Return the moments outside the steps that do not fit although the steps do."""
    return [name for name, moment in plan.moments.items() if plan.fits and moment.fits is False]


def make_room(
    session: Session, config: Config, plan: Plan, budget_bytes: int | None
) -> MadeRoom | None:
    """Return the first change with which more fits outside the steps than now.

    If nothing helps, the last that was tried, a batch of one sample; None if nothing is to be done or was planned.
    """
    before = moments_that_do_not_fit(plan)
    if not before or plan.ranks is not None:
        return None

    def tried(section: str, name: str, value: Any) -> tuple[MadeRoom, bool] | None:
        room = MadeRoom({section: {name: value}}, {})
        try:
            changed = load_config(config.to_data(), [room.overrides], allow=config.granted)
        except ConfigError:
            return None
        found = session.plan([changed], budget_bytes=budget_bytes, whole_run=True)[0].found
        if found is None or not found.fits:
            return None
        helps = len(moments_that_do_not_fit(found)) < len(before)
        return MadeRoom(room.patch, found.moments), helps

    for trick in reliefs("moments"):
        if trick.name in config.memory.tricks or any(
            other in config.memory.tricks for other in trick.conflicts
        ):
            continue
        found = tried("memory", trick.name, trick.proposals[0])
        if found is not None and found[1]:
            return found[0]
    if before == [RESUME] or config.train.batch_size == 1:  # a resume has no batch
        return None
    least = tried("train", "batch_size", 1)
    if least is None or not least[1]:
        return None if least is None else least[0]
    batch = int(share_between(plan, least[0].moments, before[0]) * config.train.batch_size)
    larger = tried("train", "batch_size", batch) if batch > 1 else None
    return larger[0] if larger is not None and larger[1] else least[0]


def share_between(plan: Plan, least: dict[str, PlannedMoment], name: str) -> float:
    """Return the share of a batch with which a moment fits, if its bytes grow evenly from those of one sample."""
    small, large = least[name].reserved, plan.moments[name].reserved
    room = plan.budget - plan.context_bytes - small
    return 0.95 * min(1.0, max(0.0, room / max(1, large - small)))
