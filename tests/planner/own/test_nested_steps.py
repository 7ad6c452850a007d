"""Steps on nested tensors in the layout `torch.jagged`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session
from scripts.plans.live_bytes import live_bytes
from tests.planner.own import nested_steps
from tests.planner.own.own_plans import plan_of

STEPS = Path(nested_steps.__file__)


def planned(session: Session, name: str, **options: Any) -> Plan:
    return plan_of(session, STEPS, name, options)


def test_sequences_of_known_lengths_are_planned_as_real_ones_are() -> None:
    """They were refused."""
    fields = {"where": str(STEPS), "function": "embedded"}
    found = live_bytes(
        *((fields, {"device": "cpu", "by_offsets": by_offsets}) for by_offsets in (False, True))
    )
    for expected, measured in found:
        assert expected == measured


@pytest.mark.parametrize("half", [False, True])
def test_attention_on_a_card_reads_all_rows_and_pads_none(session: Session, half: bool) -> None:
    plan = planned(session, "transformer", half=half)
    embed, block, head = 50 * 32, 4 * 32 + 4 * (32 * 32 + 32) + 8 * 32 * 32 + 5 * 32, 32 * 10 + 10
    exact = 4 * (embed + block + head)
    assert plan.by_category["parameters"] == pytest.approx(exact, abs=24 * 512)
    assert plan.by_category["parameters"] >= exact
    longest = planned(session, "transformer", half=half, lengths=(50, 50, 50))
    assert plan.by_category["activations"] < 0.75 * longest.by_category["activations"]
