"""Steps with parts as libraries have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session
from tests.planner.own import library_steps
from tests.planner.own.own_plans import plan_of

WEIGHT = 4 * library_steps.SIZE**2
STEPS = Path(library_steps.__file__)


def planned(session: Session, name: str, **options: object) -> Plan:
    return plan_of(session, STEPS, name, options)


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


def test_a_range_that_a_step_makes_is_read(session: Session) -> None:
    assert planned(session, "summed_over").by_category["gradients"] > 0


def test_each_place_of_a_drawn_order_comes_once(session: Session) -> None:
    stacked = 16 * 4 * 64 * library_steps.SIZE
    assert planned(session, "in_any_order").allocated >= stacked


@pytest.mark.parametrize("kind", ["Picture", "Described"])
def test_tensors_of_a_library_s_class_are_planned_as_tensors(session: Session, kind: str) -> None:
    plain = planned(session, "of_own_class", kind="Picture", batch=64)
    plan = planned(session, "of_own_class", kind=kind, batch=64)
    assert plan.by_category["activations"] == plain.by_category["activations"] > 0


def test_lists_of_layers_may_have_places_that_are_left_out(session: Session) -> None:
    assert planned(session, "with_places_left_out").by_category["parameters"] > WEIGHT
    source = {
        "where": str(STEPS),
        "function": "with_places_left_out",
        "folder": str(STEPS.parents[3]),
    }
    # such a list of blocks ended the plan; a loop over it would meet the place that is left out
    ways = session.plan_own(source, {"blocks": 5}, with_changes=True).get().ways
    lines = [line for way in ways for line in way.lines if "checkpoint" in line]
    blocks = "[*model.blocks[0:3], model.blocks[4], model.blocks[5]]"
    assert lines
    assert all(one.startswith(f"for block in {blocks}:") for one in lines), lines
