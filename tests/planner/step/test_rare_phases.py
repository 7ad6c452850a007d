"""A phase that comes every few steps: planned for at its peak, and by its share in the time of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpt.config.load import load_config
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session

ROOT = Path(__file__).parents[3]


def plan_lazy(session: Session, r1_every: int, path_every: int) -> Plan:
    config = load_config(
        "@stylegan2_16",
        [f"task.r1_every={r1_every}", f"task.path_every={path_every}", "train.batch_size=4"],
    )
    return session.plan([config])[0].get()


@pytest.mark.slow
def test_a_step_s_time_has_a_rare_phase_by_its_share_and_the_peak_has_all_of_it(
    session: Session,
) -> None:
    always, rarely = plan_lazy(session, 1, 1), plan_lazy(session, 8, 8)
    never = plan_lazy(session, 1000, 1000)
    assert rarely.allocated == always.allocated
    penalties = (always.step_seconds - never.step_seconds) / (1 - 1 / 1000)
    assert penalties > 0.2 * always.step_seconds
    assert rarely.step_seconds == pytest.approx(
        never.step_seconds + penalties * (1 / 8 - 1 / 1000), rel=1e-6
    )
