"""A resume is a moment of the plan, and holds what a real one holds."""

from __future__ import annotations

import pytest

from mpt.planner.client.session import Session
from tests.planner.configs import make
from tests.planner.resume_against_real import FURTHER, SETTINGS
from tests.programs import rows_of

RANDOM_STATES = 5056 + 624 * 8 + 625 * 8
"""Bytes of torch's, numpy's and Python's generators in a checkpoint, which a plan leaves out."""


@pytest.mark.parametrize(
    "words", [[], pytest.param(["all"], marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_resumes_on_this_cpu_take_what_was_planned_to_the_byte(words: list[str]) -> None:
    rows = rows_of("tests.planner.resume_against_real", *words)
    assert len(rows) == len(SETTINGS) + (len(FURTHER) if words else 0)
    for row in rows:
        assert row["tracked"] - row["planned"] == RANDOM_STATES, row
        assert row["record"] - row["planned"] == RANDOM_STATES, row


def test_a_resume_holds_weights_and_adams_averages_and_reads_the_checkpoint_into_host_memory(
    session: Session,
) -> None:
    plan = session.plan([make("small_cnn", batch_size=16)], whole_run=True)[0].get()
    found = plan.moments["resume"]
    held = plan.by_category["parameters"] + plan.by_category["optimizer state"]
    assert found.grown == 0
    assert held <= found.allocated < plan.allocated
    assert held * 0.9 < found.host_bytes < held * 1.1
    assert plan.as_data()["moments"]["resume"]["host_bytes"] == found.host_bytes
    assert "host_bytes" not in plan.as_data()["moments"]["saving"]
