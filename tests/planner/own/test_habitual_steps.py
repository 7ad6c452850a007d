"""Steps with habits of many scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.errors import MptError
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session
from tests.planner.own import habitual_steps
from tests.planner.own.own_plans import plan_of

STEPS = Path(habitual_steps.__file__)


def planned(session: Session, name: str, **options: Any) -> Plan:
    return plan_of(session, STEPS, name, options)


@pytest.mark.parametrize("in_half", [False, True])
def test_attention_is_planned_by_the_kernel_that_a_script_chooses(
    session: Session, in_half: bool
) -> None:
    scores = 2 * 4 * 256 * 256 * 4  # of the plain formula, in float32 in either case
    plain, by_name, others_off = (
        planned(session, "attended", in_half=in_half, **chosen)
        for chosen in ({}, {"kernel": "MATH"}, {"switched_off": True})
    )
    assert by_name.by_category["activations"] > scores
    assert by_name.allocated == others_off.allocated
    assert plain.allocated < by_name.allocated - scores
    # what a script switches off is on again in the next
    assert planned(session, "attended", in_half=in_half).allocated == plain.allocated


def test_a_kernel_of_attention_that_does_not_take_float32_is_refused_as_by_torch(
    session: Session,
) -> None:
    with pytest.raises(MptError, match=r"No available kernel.*habitual_steps.py:\d+"):
        planned(session, "attended", kernel="FLASH_ATTENTION")
    efficient = planned(session, "attended", kernel="EFFICIENT_ATTENTION")
    assert efficient.allocated == planned(session, "attended").allocated


def test_memory_that_a_script_gives_back_is_no_longer_reserved(session: Session) -> None:
    kept, given_back = (planned(session, "given_back", is_given_back=one) for one in (False, True))
    assert kept.allocated == given_back.allocated
    # 64 MiB, of which 40 are taken again and 16 by cuBLAS, and twice 40; else three times 40, and 20 for cuBLAS
    assert kept.reserved - given_back.reserved == 4 * 2**20


def test_comparisons_of_whole_tensors_are_read_values(session: Session) -> None:
    plan = planned(session, "compared")
    assert plan.by_category["gradients"] == 4 * 64 * 64 + 512
    assert any("the step reads values (6 times)" in note for note in plan.notes), plan.notes


def test_autocast_is_not_proposed_where_it_breaks_a_sum(session: Session) -> None:
    """It was, and half messages into float32 zeros were planned, which no kernel takes."""
    source = {"where": str(STEPS), "function": "summed", "folder": str(STEPS.parents[3])}
    ways = session.plan_own(source, {}, with_changes=True).get().ways
    assert not any("autocast" in line for way in ways for line in way.lines)
    with pytest.raises(MptError, match=r"index_add.*one dtype.*habitual_steps.py:\d+"):
        planned(session, "summed", in_half=True)
    with pytest.raises(MptError, match=r"query, key, and value.*habitual_steps.py:\d+"):
        planned(session, "summed", in_half=True, attends=True)
    assert planned(session, "summed", attends=True).allocated > 65536 * 256 * 4


WAYS = {
    "bincount": 2,
    "histc": 2,
    "one_hot": 2,
    "scattered": 2,
    "masks": 1,
    "any": 2,
    "columns": 2,
    "table": 2,
    "eq": 2,
}
"""Way in which tokens are shared out -> experts that each token goes to."""


@pytest.mark.parametrize("way", WAYS)
def test_experts_get_the_tokens_that_a_gate_chooses(session: Session, way: str) -> None:
    """Their counts had been read as 0, and all experts were left out; each mask had all tokens."""
    few, many = (planned(session, "experts", way=way, tokens=each) for each in (2048, 4096))
    rows = 2048 * 64 * 4
    grown = many.allocated - few.allocated
    # of each of their tokens what goes into the experts, and what comes out
    assert 2 * WAYS[way] * rows < grown < (3 + 7 * WAYS[way]) * rows
    assert any("were taken to be even" in note for note in many.notes)


def test_rows_of_one_predicted_class_may_be_all_of_them(session: Session) -> None:
    few, many = (planned(session, "one_class", tokens=each) for each in (2048, 4096))
    rows = 2048 * 64 * 4
    assert many.allocated - few.allocated >= 3 * rows  # drawn, chosen, and what comes out
    assert not any("even" in note for note in many.notes)


def test_pairs_of_one_predicted_class_may_be_all_pairs(session: Session) -> None:
    """They were taken for masks of all classes, since there are as many as a table of rows and classes has at least."""
    plan = planned(session, "alike", tokens=256)
    assert plan.by_category["activations"] >= 256 * 256 * 64 * 4
    assert not any("even" in note for note in plan.notes)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_products_in_groups_are_planned_in_each_dtype(session: Session, dtype: str) -> None:
    """Torch's rule for fake tensors took bfloat16 alone."""
    plan, size = planned(session, "in_groups", dtype=dtype), getattr(torch, dtype).itemsize
    assert plan.by_category["parameters"] == plan.by_category["gradients"]
    assert plan.by_category["parameters"] == 4 * 64 * 128 * size


def test_a_loop_that_ends_when_no_number_is_out_of_bounds_ends(session: Session) -> None:
    assert planned(session, "drawn_anew").by_category["gradients"] == 4 * 64 * 64 + 512


@pytest.mark.parametrize("kept", ["features", "average", "last"])
def test_what_each_step_keeps_is_noted(session: Session, kept: str) -> None:
    notes = [note for note in planned(session, "collected", kept=kept).notes if "leaves" in note]
    assert len(notes) == (kept == "features")
    if notes:
        assert "leaves 256.0 KiB" in notes[0]
        assert "250.0 MiB after 1,000 steps" in notes[0]


def test_a_script_is_told_what_it_holds_on_the_card(session: Session) -> None:
    plan = planned(session, "sized_by_the_card")
    held = plan.by_category
    assert held["parameters"] == held["gradients"] == 4 * 256 * 256 + 1024
    assert not any("even" in note for note in plan.notes)  # the gradient of a sum is ones


def test_weights_of_shares_are_read_from_a_whole_copy(session: Session) -> None:
    """The place of a process in its mesh was what lay in memory by chance."""
    alone, read = (planned(session, "shared_out", reads=each) for each in (False, True))
    assert read.allocated == alone.allocated
    assert read.by_category == alone.by_category


def test_nested_tensors_of_the_older_layout_are_refused_by_name(session: Session) -> None:
    words = r"nested tensors are planned in the layout torch.jagged alone.*habitual_steps.py:\d+"
    with pytest.raises(MptError, match=words):
        planned(session, "of_several_lengths")


def test_a_weight_that_was_on_the_host_in_between_gets_its_gradient(session: Session) -> None:
    """The gradient of a graph from before a move went to a tensor that nobody had."""
    kept, parked = (planned(session, "parked", between=each) for each in (False, True))
    assert parked.by_category["gradients"] == kept.by_category["gradients"] > 0
    assert parked.allocated == kept.allocated


def test_memory_that_a_tensor_gives_back_in_place_is_free(session: Session) -> None:
    held, emptied = (planned(session, "emptied", gives_back=each) for each in (False, True))
    assert held.allocated - emptied.allocated == 4 * 2**18


def test_tensors_are_told_apart_by_their_addresses(session: Session) -> None:
    """Accelerate finds the shards of an optimizer's weights so; one shard was updated in the place of all."""
    plan = planned(session, "told_apart")
    assert plan.by_category["optimizer state"] == 2 * 2 * 4 * 256 * 256


def test_least_squares_are_planned_where_a_script_catches_errors(session: Session) -> None:
    """Torch's rule for fake tensors refuses them, since some of their results depend on ranks."""
    plan = planned(session, "fitted")
    assert (
        plan.by_category["parameters"] == 8 * 256 * 32 * 4
    )  # all rows of the sums, of which 64 are the solution
    assert not any("results whose size" in note for note in plan.notes)


def test_placeholders_of_a_symbolic_trace_are_asked_nothing(session: Session) -> None:
    plan = planned(session, "traced")
    assert plan.by_category["gradients"] >= 4 * (64 * 64 + 64 + 64 + 1)


def test_a_weight_without_dimensions_moves_to_the_card(session: Session) -> None:
    none, one = (planned(session, "scaled", dimensions=each) for each in ([], [1]))
    assert none.by_category["parameters"] == one.by_category["parameters"]
