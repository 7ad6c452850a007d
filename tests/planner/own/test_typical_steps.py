"""Steps of scripts that choose their device in their first lines, and more that scripts do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.errors import MptError
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session
from mpt.planner.recipes.own_step import find_source
from tests.planner.own import typical_steps
from tests.planner.own.own_plans import plan_of

STEPS = Path(typical_steps.__file__)


def planned(session: Session, name: str, **options: Any) -> Plan:
    return plan_of(session, STEPS, name, options)


def test_a_device_that_a_script_chooses_in_its_first_lines_is_the_card(session: Session) -> None:
    plan = planned(session, "classifier")
    weights = 4 * (192 * 256 + 256 + 256 * 10) + 512
    assert plan.by_category["parameters"] == plan.by_category["gradients"] == weights
    assert not any("puts nothing on" in note for note in plan.notes)


def test_a_loader_with_workers_is_planned_as_one_without(session: Session) -> None:
    with_workers = planned(session, "classifier", workers=2)
    assert with_workers.by_category == planned(session, "classifier").by_category


def test_a_script_that_names_the_cpu_alone_is_planned_as_if_that_were_the_card(
    session: Session,
) -> None:
    plan = planned(session, "on_the_cpu")
    weights = 4 * (256 * 256 + 256)
    assert plan.by_category["parameters"] == plan.by_category["optimizer state"] == weights
    assert any("puts nothing on" in note for note in plan.notes)


def test_checks_of_distributions_pass(session: Session) -> None:
    assert planned(session, "sampled").by_category["parameters"] == 4 * (64 * 64) + 512


def test_parts_of_a_network_that_are_dropped_hold_nothing(session: Session) -> None:
    plan = planned(session, "shortened")
    assert plan.by_category["parameters"] == 4 * (64 * 64) + 512
    assert {name for name, _ in plan.by_module if name[0] != "("} <= {"features.0", "features"}


@pytest.mark.parametrize("first_in_step", [False, True])
def test_lazy_layers_are_planned_as_those_that_they_become(
    session: Session, first_in_step: bool
) -> None:
    lazy, plain = (
        planned(session, "lazily", is_lazy=each, first_in_step=first_in_step)
        for each in (True, False)
    )
    assert lazy.by_category == plain.by_category
    assert lazy.allocated == plain.allocated
    assert lazy.by_module == plain.by_module


def test_weights_in_memory_of_their_copies_are_weights(session: Session) -> None:
    assert planned(session, "sharpened").by_category["parameters"] >= 4 * (256 * 256 + 256)


def test_checkpoints_are_neither_written_nor_missed(session: Session, tmp_path: Path) -> None:
    of_a_run = tmp_path / "of_a_run"
    of_a_run.mkdir()
    torch.save(torch.nn.Linear(64, 64).state_dict(), of_a_run / "true.pt")
    for to_host in (False, True):
        plan = planned(session, "kept_in_files", folder=str(of_a_run), to_host=to_host)
        assert plan.by_category["parameters"] == 4 * (64 * 64) + 512
        assert any("reads values (2 times)" in note for note in plan.notes)
    assert [path.name for path in of_a_run.iterdir()] == ["true.pt"]


def test_what_a_script_makes_in_its_first_lines_is_on_the_card(session: Session) -> None:
    path = STEPS.with_name("whole_script.py")
    first, second = (plan_of(session, path, "build", {}) for _ in range(2))
    weights = 4 * (256 * 256 + 256)
    assert first.by_category["parameters"] == weights
    assert first.by_category["optimizer state"] == pytest.approx(2 * weights, rel=0.01)
    assert any(name.startswith("network") for name, _ in first.by_module)
    assert first.by_category == second.by_category
    # the script's default device is gone
    assert any("puts nothing on" in note for note in planned(session, "on_the_cpu").notes)


@pytest.mark.slow  # of the compiler's import
def test_compiled_flex_attention_keeps_no_scores(session: Session) -> None:
    length = 1024
    plan = planned(session, "looks_where", length=length)
    coded = 4 * 2 * 4 * length * 3 * 64
    # the gradients of three parts are joined, and the output's is expanded
    assert plan.allocated < 4 * coded + 32 * 2**20
    assert plan.by_category["activations"] >= coded * 4 // 3
    with pytest.raises(MptError, match=r"call torch\.compile.*typical_steps"):
        planned(session, "looks_where", is_compiled=False)


@pytest.mark.slow  # of the compiler's import
def test_a_compiled_mask_of_blocks_has_no_pairs_of_places(session: Session) -> None:
    """torchtitan was planned with 2.6 GiB for the masks of 16,384 tokens, which a kernel does not write."""
    compiled, eager = (
        planned(session, "masks_blocks", is_compiled=one).allocated for one in (True, False)
    )
    assert eager > 4096 * 4096 * 8 > 2 * compiled


def test_an_adjacency_matrix_takes_the_memory_of_its_edges(session: Session) -> None:
    few, many = (planned(session, "on_a_graph", edges=each) for each in (4096, 2**18))
    places_and_values = (2**18 - 4096) * (2 * 8 + 4)
    # the adjacency, and transposed in backward before and after its places are sorted
    assert 2 * places_and_values < many.allocated - few.allocated < 4 * places_and_values
    assert not any("sparse gradients" in note for note in few.notes)
    for function in ("sparse", "matmul"):
        other = planned(session, "on_a_graph", function=function)
        assert other.by_category == few.by_category


def test_an_error_that_may_follow_from_a_value_names_where_it_was_read(session: Session) -> None:
    words = r"ZeroDivisionError.*; a value read at .*typical_steps.py:\d+ was taken as 0"
    with pytest.raises(MptError, match=words):
        planned(session, "averaged", least=0.0)
    notes = planned(session, "averaged").notes
    assert any("since the step cannot be planned without them" in note for note in notes)


def test_what_a_library_checks_of_drawn_numbers_is_true(session: Session) -> None:
    plan = planned(session, "checked")
    assert plan.by_category["parameters"] == 4 * (64 * 64) + 512
    assert any("loads and draws" in note for note in plan.notes)


def test_all_is_recomputed_but_a_head_that_changes_the_list_that_it_takes(session: Session) -> None:
    source = find_source(f"{STEPS}:detector", ())
    found = session.plan_own(source, {}).get()
    way = next(way for way in found.ways if way.exact)
    assert "for block in model.layers[0:6]: block.forward = " in "\n".join(way.lines)
    assert way.plan.by_category["activations"] < 0.8 * found.plan.by_category["activations"]


@pytest.mark.parametrize("foreach", [None, True, False])
def test_weights_that_were_changed_since_their_forward_are_refused_as_by_torch(
    session: Session, foreach: bool | None
) -> None:
    with pytest.raises(MptError, match=r"modified by an inplace operation.*typical_steps.py:\d+"):
        planned(session, "stepped_between", foreach=foreach)


def test_layers_in_a_row_are_proposed_in_pieces_and_the_proposed_line_does_what_was_planned(
    session: Session,
) -> None:
    found = session.plan_own(find_source(f"{STEPS}:in_a_row", ("tests",)), {}).get()
    (way,) = [way for way in found.ways if "checkpoint_sequential" in "".join(way.lines)][:1]
    assert way.exact
    assert way.plan.allocated < 0.7 * found.plan.allocated
    changed = planned(session, "in_a_row", lines="\n".join(way.lines))
    assert changed.allocated == way.plan.allocated


def test_data_are_made_of_true_values_if_zeros_make_none(session: Session) -> None:
    assert planned(session, "cropped").by_category["parameters"] == 4 * (64 * 64) + 512


@pytest.mark.parametrize("how", ["to", "normed", "by_hand"])
def test_weights_are_moved_whatever_refers_to_them_and_keep_their_hooks(
    session: Session, how: str
) -> None:
    plan = planned(session, "moved", how=how)
    weights = 4 * (256 * 256 + 256) + (4 * 256 if how == "normed" else 0)
    kinds = ("parameters", "gradients", "optimizer state")
    assert [plan.by_category[kind] for kind in kinds] == [weights] * 3


def test_operators_that_inference_mode_leaves_whole_are_planned_by_their_parts(
    session: Session,
) -> None:
    inferred, plain = (
        planned(session, "asked_without_gradients", is_inference=each) for each in (True, False)
    )
    assert inferred.allocated == plain.allocated
    assert inferred.step_seconds == plain.step_seconds


def test_a_recurrent_cell_keeps_its_state_and_the_gates_of_a_cards_kernel(session: Session) -> None:
    few, many = (planned(session, "unrolled", times=each) for each in (4, 12))
    state, given = 4 * 64 * 128, 4 * 64 * 32
    # its state, the gates of input and state (for a second derivative), and its workspace
    assert many.allocated - few.allocated == 8 * ((1 + 3 + 3 + 5) * state + given)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_is_planned_with_its_full_history(session: Session, line_search: str | None) -> None:
    few, many = (
        planned(session, "fitted", history=each, line_search=line_search) for each in (10, 40)
    )
    picture, number = 4 * 3 * 64 * 64, 512
    grown = 30 * (2 * picture + 2 * number)  # directions, steps and two numbers of each
    assert many.allocated - few.allocated == pytest.approx(grown, rel=0.001)
    assert many.by_category["optimizer state"] > 0.9 * grown
    assert any("full history of 40 steps" in note for note in many.notes)


@pytest.mark.parametrize("first_in_step", [False, True])
def test_copies_of_networks_are_weights_and_loaded_states_are_states(
    session: Session, first_in_step: bool
) -> None:
    held = planned(session, "followed", first_in_step=first_in_step).by_category
    weight = 4 * 256 * 256
    assert [held[kind] for kind in ("parameters", "optimizer state")] == [2 * weight, weight]


def test_a_plan_starts_from_the_switches_that_the_one_before_it_started_from(
    session: Session,
) -> None:
    first, second = (planned(session, "measured_in_double") for _ in range(2))
    assert first.by_category == second.by_category
    assert planned(session, "lazily").by_category["parameters"] < 2**16


@pytest.mark.parametrize("largest", [16, 32])
def test_a_size_that_is_drawn_is_the_largest_that_it_can_be(session: Session, largest: int) -> None:
    drawn = planned(session, "cut_out", largest=largest)
    assert drawn.allocated == planned(session, "cut_out", size=largest).allocated
