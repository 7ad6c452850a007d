"""The largest batch of a step whose trace is no line over the batch: each size is traced again, up to a limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpt.planner.plans import plan
from mpt.planner.recipes.words import describe_largest
from mpt.planner.trace.trace import Span, Storage, Trace
from tests.planner.made_plans import make_plan

MIB = 2**20


def step_of(batch: int) -> Any:
    """A step whose events differ from one batch to the next, and that holds a MiB for each sample."""
    sizes = [batch * MIB] + [1] * (batch % 7)
    storages = [Storage(size, "activations", "net", "aten::mm") for size in sizes]
    events = [*range(len(sizes)), *(~index for index in range(len(sizes)))]
    return SimpleNamespace(trace=Trace(storages, events, [Span(0, 0, "net", "forward")]))


@pytest.mark.parametrize(
    ("budget", "limit", "said"),
    [
        (100, 1000, ("91", "that fits; up to 98 may")),
        (100, 53, ("64", "that fits; up to 98 may")),
        (66, 53, ("64", "may fit; smaller ones were not tried")),
    ],
)
def test_batches_that_were_not_traced_before_the_limit_are_not_said_to_be_unsure(
    monkeypatch: pytest.MonkeyPatch, budget: int, limit: int, said: tuple[str, str]
) -> None:
    monkeypatch.setattr(plan, "RETRACED_EVENTS", limit)
    most, surely, is_bound = plan._largest_batches(
        step_of(128), 128, step_of, budget * MIB, 0, expandable=False
    )
    found = make_plan(
        batch_size=128, largest_batch=most, largest_surely=surely, largest_is_bound=is_bound
    )
    assert describe_largest(found) == said
