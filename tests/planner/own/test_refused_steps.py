"""Steps that fail with real tensors are refused with their line, and others of the same kind are planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mpt
from mpt.errors import MptError
from mpt.planner.client.session import Session
from scripts.plans.live_bytes import live_bytes
from tests.planner.own import refused_steps
from tests.planner.own.own_plans import plan_of

STEPS = Path(refused_steps.__file__)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("masked", {}, "does not fit the tensor of shape"),
        ("states", {}, "hidden tensors are not the same dtype"),
        ("of_functions", {"name": "cond"}, "cond, which takes functions, is not followed: write"),
        ("of_functions", {"name": "scan"}, "scan, which takes functions, is not followed: write"),
    ],
)
def test_what_kernels_refuse_is_refused(
    session: Session, name: str, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(MptError, match=rf"{error}.*refused_steps.py:\d+"):
        plan_of(session, STEPS, name, options)


def test_masks_and_states_that_fit_are_planned(session: Session) -> None:
    assert plan_of(session, STEPS, "masked", {"rows": 4}).by_category
    assert plan_of(session, STEPS, "states", {"dtype": "bfloat16"}).by_category


def test_labels_and_masks_of_bytes_are_planned_as_kernels_take_them() -> None:
    """They were refused."""
    fields = {"where": str(STEPS), "function": "labelled_in_bytes"}
    [(planned, measured)] = live_bytes((fields, {"device": "cpu"}))
    assert planned == measured


def test_a_card_that_is_named_and_not_used_is_planned_as_if_it_were(session: Session) -> None:
    """A plan said that an empty card was enough."""
    plan = plan_of(session, STEPS, "named_alone", {})
    assert plan.by_category["parameters"] == 4 * (256 * 256 + 256)
    assert any("puts nothing on" in note for note in plan.notes)


def test_masks_are_counted_where_no_card_is_named(session: Session) -> None:
    """They were refused for an operator that the stand-in for a card has not."""
    assert plan_of(session, STEPS, "counted_without_a_card", {}).by_category["parameters"]


def test_a_build_without_cuda_answers_as_one_with_it(session: Session) -> None:
    """torchtune was refused for bfloat16, and what asks as torch's tutorial on FSDP does was planned in float32."""
    plan = plan_of(session, STEPS, "asks_of_the_build", {})
    assert plan.by_category["parameters"] <= 2 * 256 * 256 + 1024


def test_a_build_for_rocm_has_no_release_of_cuda() -> None:
    step = mpt.plan_step(refused_steps.asks_of_the_build, gpu="rx7900xtx")
    assert step.plan.by_category["parameters"] >= 4 * 256 * 256
