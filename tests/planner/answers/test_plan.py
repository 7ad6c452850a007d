"""A plan's form in JSON: the same after it was written and read, and read as earlier versions wrote it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from mpt.planner.answers.plan import (
    Growing,
    Plan,
    PlannedMoment,
    PlannedRanks,
    StepSeconds,
    WithinBudget,
)
from mpt.planner.facts.verdict import judge
from tests.planner.made_plans import make_plan

pytestmark = pytest.mark.tier("fast")

SECONDS = StepSeconds(
    total=1.0, computing=0.8, communication=0.4, overlapped=0.2, exposed=0.2, sent_bytes=10
)
RANKS = PlannedRanks(
    nproc=2,
    strategy="ddp",
    network="ethernet-10",
    per_machine=8,
    rank=0,
    words="ddp",
    samples=32,
    host_bytes=0,
    communicator_bytes=5,
    link="PCI Express",
    seconds=SECONDS,
)
GROWING = Growing(reserved=1, reserved_in_budget=1, fits=True, tight=False)
MOMENTS = {
    "evaluation": PlannedMoment(1, 2, 3, True, reads_values=True),
    "saving": PlannedMoment(problem="why"),
}
LARGE = make_plan(
    ranks=RANKS,
    growing=GROWING,
    moments=MOMENTS,
    by_module=[("net", 5)],
    timeline={"activations": [1, 2]},
    at_budgets={
        "100": WithinBudget(100, fits=False, tight=False, reserved_in_budget=7, growing=GROWING)
    },
)


@pytest.mark.parametrize(
    "plan", [make_plan(), LARGE, replace(LARGE, ranks=replace(RANKS, last_samples=1, last_total=2))]
)
def test_a_plan_is_the_same_after_its_json(plan: Plan) -> None:
    assert Plan.from_data(json.loads(json.dumps(plan.as_data()))) == plan


def test_what_some_plans_lack_is_left_out_of_their_json() -> None:
    data = make_plan(moments={"saving": PlannedMoment(1, 2, 0, None)}).as_data()
    assert (data["growing"], data["ranks"]) == ({}, {})
    assert data["moments"]["saving"] == {"allocated": 1, "reserved": 2, "grown": 0, "fits": None}
    assert LARGE.as_data()["moments"]["saving"] == {"problem": "why"}
    assert "last_total" not in LARGE.as_data()["ranks"]


def test_a_plan_of_another_version_is_read_without_what_it_lacks_and_has_beside() -> None:
    later = {"notes", "inexact", "timeline", "moments", "planning_seconds", "ranks", "at_budgets"}
    data: dict[str, Any] = {
        key: value for key, value in LARGE.as_data().items() if key not in later
    }
    read = Plan.from_data({**data, "verdict": "fits", "as_torch": {}, "a field of another time": 1})
    assert (read.allocated, read.growing, read.ranks) == (LARGE.allocated, GROWING, None)


def test_a_plan_is_as_it_is_within_another_of_its_budgets() -> None:
    other = LARGE.at_budget(100)
    assert (other.budget, other.fits, other.total) == (100, False, LARGE.with_room)


def test_an_assumed_workspace_counts_in_the_total_as_far_as_there_is_room() -> None:
    plan = make_plan(
        reserved=600, reserved_in_budget=600, context_bytes=100, budget_bytes=1000, fits=True
    )
    assert [replace(plan, assumed_workspace=size).total for size in (0, 200, 500)] == [
        700,
        900,
        1000,
    ]
    assert replace(plan, assumed_workspace=500, fits=False).total == 1200
    assert replace(plan, assumed_workspace=500, fits=None, budget_bytes=None).total == 1200
    larger = replace(plan, assumed_workspace=500)
    assert (larger.with_room, larger.without_assumed, judge(larger)) == (1200, 700, judge(plan))
