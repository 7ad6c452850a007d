"""Steps with parts as libraries have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session
from tests.planner.own import library_steps
from tests.planner.own.own_plans import plan_of

WEIGHT = 4 * library_steps.SIZE**2


def planned(session: Session, name: str, **options: object) -> Plan:
    return plan_of(session, Path(library_steps.__file__), name, options)


@pytest.mark.parametrize("keeps_start", [True, False])
def test_an_optimizer_that_reads_a_sum_over_gradients_makes_its_update(
    session: Session, keeps_start: bool
) -> None:
    plan = planned(session, "with_own_rate", keeps_start=keeps_start)
    assert plan.by_category["optimizer state"] == (2 + keeps_start) * WEIGHT
    assert any("optimizers read values (2 times)" in note for note in plan.notes)


def test_an_optimizer_may_keep_state_by_a_name(session: Session) -> None:
    plan = planned(session, "with_named_state")
    assert plan.by_category["optimizer state"] == WEIGHT + 512


def test_a_loss_scale_that_an_optimizer_steps_by_finds_no_overflow(session: Session) -> None:
    held = planned(session, "wrapped").by_category
    assert 2 * WEIGHT <= held["optimizer state"] <= 2 * WEIGHT + 1024
