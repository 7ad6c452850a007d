"""A step whose memory depends on numbers that it draws is planned with the largest of a few draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session
from tests.planner.own import drawn_steps
from tests.planner.own.own_plans import plan_of

STEPS = Path(drawn_steps.__file__)
SAVED = 4 * 4096 * 256
DEPENDS = "its memory depends on numbers that it draws: "


def noted(plan: Plan) -> bool:
    return any(note.startswith(DEPENDS) for note in plan.notes)


@pytest.mark.parametrize(("name", "layers"), [("layers_left_out", 7), ("one_of_three", 5)])
def test_the_largest_of_a_few_draws_is_planned_each_time(
    session: Session, name: str, layers: int
) -> None:
    first, second = (plan_of(session, STEPS, name, {}) for _ in range(2))
    assert first.by_category["activations"] >= layers * SAVED
    assert noted(first)
    assert first.by_category == second.by_category


def test_a_loaders_draws_are_no_reason_to_try_others(session: Session) -> None:
    assert not noted(plan_of(session, STEPS, "augmented", {}))


def test_batches_of_several_forms_are_those_of_other_orders_too(session: Session) -> None:
    """A loader took the first samples of a small set: trl's DPO was planned with two fifths of its memory."""
    plan = plan_of(session, STEPS, "in_any_order", {})
    # the first eight are 128 rows long at most, and four orders have hardly ever none of the longest ten
    assert plan.by_category["activations"] > 8 * 4 * 30 * 16 * 256 * 4
    assert noted(plan)


def test_a_script_that_seeds_its_generators_is_planned_with_other_draws_too(
    session: Session,
) -> None:
    """Four traces had the same draws."""
    assert noted(plan_of(session, STEPS, "in_any_order", {"is_seeded": True}))


def test_an_order_that_a_sampler_draws_from_its_own_generator_is_this_one(session: Session) -> None:
    """The first sample stood for all of a batch, such as those of torch's DistributedSampler."""
    options = {"count": 100, "has_generator": True}
    generator = torch.Generator().manual_seed(2)
    longest = 1 + int(torch.randperm(100, generator=generator)[:8].max())
    plan = plan_of(session, STEPS, "in_any_order", options)
    batch = 4 * longest * 16 * 256 * 4
    assert 8 * batch <= plan.by_category["activations"] <= 20 * batch


def test_a_step_that_is_planned_with_its_values_has_its_workspaces(session: Session) -> None:
    plan = plan_of(session, STEPS, "as_many_as_read", {})
    assert any("are those of its first two steps" in note for note in plan.notes)
    assert (
        plan.by_category["workspace"]
        == plan_of(session, STEPS, "augmented", {}).by_category["workspace"]
        > 0
    )


def test_values_of_a_batch_that_is_an_object_are_those_of_its_samples(session: Session) -> None:
    found = plan_of(session, STEPS, "as_many_as_read", {"is_object": True})
    assert found.by_category["activations"] >= 16 * 2 * 16 * 256 * 4
    assert not any("integers that are read" in note for note in found.notes)


def test_sizes_far_above_those_of_its_data_are_planned_with_these(session: Session) -> None:
    of_data, at_bound = (
        plan_of(session, STEPS, "mined", {"is_placeholder": one}) for one in (False, True)
    )
    triplets = 48 * 6 * 42
    assert triplets * 256 * 4 < of_data.allocated < 8 * triplets * 256 * 4
    assert any("the tensors would need" in note for note in of_data.notes)
    assert at_bound.allocated > 20 * of_data.allocated
    assert not any("the tensors would need" in note for note in at_bound.notes)


def test_a_small_selection_that_many_layers_keep_is_as_large_as_its_data_say(
    session: Session,
) -> None:
    plan = plan_of(session, STEPS, "kept_patches", {})
    kept = 8 * 128 * 256 * 4
    assert 8 * kept < plan.by_category["activations"] < 20 * kept
    assert any("the tensors would need" in note for note in plan.notes)


def test_samples_that_a_mask_selects_are_as_many_as_are_drawn(session: Session) -> None:
    plan = plan_of(session, STEPS, "sampled_by_a_mask", {})
    whole = 256 * 64 * 256 * 4
    assert 8 * whole / 16 < plan.by_category["activations"] < 8 * whole / 4
    assert any("the tensors would need" in note for note in plan.notes)


@pytest.mark.parametrize("by", ["scatter", "index"])
def test_a_large_mask_has_the_places_that_were_written(session: Session, by: str) -> None:
    """All places of one of more than 1 MiB were taken, and PEFT's SHiRA was refused."""
    plan = plan_of(session, STEPS, "chosen_weights", {"by": by})
    assert plan.by_category["parameters"] == 4 * 4 * 1536
    other = plan_of(session, STEPS, "chosen_weights", {"by": by, "is_known": False})
    assert other.by_category["parameters"] == 4 * 1536**2
