"""Sizes that follow from a graph's own matrices and labels are planned as these are."""

from __future__ import annotations

from pathlib import Path

from mpt.planner.client.session import Session
from scripts.plans.live_bytes import live_bytes
from tests.planner.own import graph_steps
from tests.planner.own.own_plans import plan_of

STEPS = Path(graph_steps.__file__)


def test_live_bytes_of_steps_on_a_graph_on_a_cpu_are_those_of_real_tensors() -> None:
    names = ("convolved", "attended", "converted", "adapted")
    calls = [({"where": str(STEPS), "function": name}, {}) for name in names]
    for planned, measured in live_bytes(*calls):
        assert measured == planned > 0


def test_numbers_of_a_sparse_matrix_are_trained_with_copies_for_their_gradient() -> None:
    [(planned, measured)] = live_bytes(({"where": str(STEPS), "function": "weighed"}, {}))
    # two coalesced copies of at most 512 entries, of which a few may have the same place
    assert measured <= planned <= measured + 2 * 20 * 32


def test_a_network_has_as_many_outputs_as_there_are_classes(session: Session) -> None:
    plan = plan_of(session, STEPS, "convolved", {"device": "cuda"})
    assert plan.by_category["parameters"] == 2048 + 512
    assert not any("another network" in note for note in plan.notes)


def test_the_edges_of_a_matrix_of_4_mebibytes_are_counted(session: Session) -> None:
    plan = plan_of(session, STEPS, "attended", {"device": "cuda"})
    assert plan.by_category["activations"] < 4 * 4096 * 64 * 8
    assert any("those of the batches" in note for note in plan.notes)


def test_a_dense_matrix_becomes_a_sparse_buffer_of_its_entries(session: Session) -> None:
    plan = plan_of(session, STEPS, "converted", {"device": "cuda"})
    places, numbers, answers = 2 * 8 * 4096, 4 * 4096, 4096
    assert plan.by_category["buffers"] == 2 * places + numbers + answers
