"""Steps whose weights are shared out over cards are planned as real ranks hold them, in each of torch's ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpt.errors import MptError
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session
from tests.planner.own import sharded_steps
from tests.planner.own.own_plans import plan_of

STEPS = Path(sharded_steps.__file__)
LAYER = 4 * (1024 * 1024 + 3 * 1024)


def planned(session: Session, name: str, way: str = "", ranks: int = 2) -> Plan:
    return plan_of(session, STEPS, name, {"way": way, "ranks": ranks}, with_changes=False)


def bytes_of(plan: Plan) -> int:
    return plan.allocated - plan.by_category["workspace"]


@pytest.mark.parametrize(
    ("name", "way", "ranks", "measured"),
    [
        ("flat", "waits", 2, 46_940_584),
        ("flat", "half waits", 2, 40_044_644),
        pytest.param("flat", "gradients waits", 2, 51_671_976, marks=pytest.mark.slow),
        pytest.param("flat", "original waits", 2, 46_940_584, marks=pytest.mark.slow),
        pytest.param("flat", "hybrid waits", 4, 46_940_600, marks=pytest.mark.slow),
        ("shards", "hybrid", 4, 47_071_724),
        ("columns", "sequence", 2, 142_872_680),
        pytest.param("columns", "", 2, 142_872_680, marks=pytest.mark.slow),
        pytest.param("columns", "", 4, 105_591_160, marks=pytest.mark.slow),
    ],
)
def test_shared_weights_are_planned_as_gloo_ranks_hold_them(
    session: Session, name: str, way: str, ranks: int, measured: int
) -> None:
    """Live bytes on CPUs: `tests/planner/own/sharded_steps.py` says how they were measured."""
    plan = planned(session, name, way, ranks)
    # by whole blocks of 512 bytes, and what ends in a layer is given back after it
    assert bytes_of(plan) == pytest.approx(measured, rel=0.006)
    assert any(f"the first of {ranks} cards" in note for note in plan.notes)


def test_memory_that_another_stream_uses_is_free_only_once_the_host_has_waited(
    session: Session,
) -> None:
    waits, limited, unlimited = (
        planned(session, "flat", way) for way in ("waits", "", "unlimited")
    )
    # torch lets the host be two gathered layers ahead; each has its own gradient
    assert 2 * LAYER < bytes_of(limited) - bytes_of(waits) < 5 * LAYER
    # all layers, in the forward and in the backward pass
    assert unlimited.by_category["gathered parameters"] == pytest.approx(8 * LAYER, rel=0.01)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("flat", "waits"),
        ("flat", "half waits"),
        pytest.param("shards", "waits", marks=pytest.mark.slow),
    ],
)
def test_what_is_on_the_host_is_not_on_the_card(session: Session, name: str, way: str) -> None:
    plan = planned(session, name, f"host {way}")
    assert not {"parameters", "optimizer state"} & plan.by_category.keys()
    assert plan.by_category["gathered parameters"] >= (LAYER if "half" in way else 2 * LAYER)


@pytest.mark.slow
def test_a_stage_of_a_pipeline_is_refused_by_name(session: Session) -> None:
    """The reason given was a version of NCCL's that is not there."""
    with pytest.raises(MptError, match=r"waits for what another process sends .* as stages of a"):
        planned(session, "stages")


def test_parts_of_weights_and_gradients_are_read(session: Session) -> None:
    """`nn.init.trunc_normal_` and `gradient.isfinite().all()` were refused, as was a seed for parts of a mesh."""
    plan = planned(session, "read")
    assert plan.by_category["parameters"] > 2 * LAYER
