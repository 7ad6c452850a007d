"""Of the passes that an update adds up the first few are executed, and the plan is that of all."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mpt.planner.facts.gpus import DEFAULT, find_gpu
from mpt.planner.own import trace
from mpt.planner.own.execution.source import Source
from mpt.planner.own.proposals.changes import Changes
from mpt.planner.own.stand_ins.added_passes import AddedPasses
from mpt.planner.own.trace import OwnRun, trace_own
from mpt.planner.trace.replay import replay
from tests.planner.own import added_steps

GPU = find_gpu(DEFAULT)


def traced(name: str) -> OwnRun:
    return trace_own(Source(str(Path(added_steps.__file__)), name), {}, GPU, None, Changes())


def left_out(run: OwnRun) -> int:
    said = [one for one in run.fake.notes if "passes of its updates were left out" in one]
    return int(said[0].split()[0]) if said else 0


def figures(run: OwnRun) -> Any:
    found = replay(run.fake.trace)
    return found.allocated, found.reserved, run.fake.work.seconds(GPU)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accumulating", 2 * 7),
        ("inside", 2 * 7),
        ("keeping", 2 * 7),
        ("keeping_inside", 0),
        ("together", 0),
        ("differing", 2 * 5),
        ("asking", 0),
        ("looking", 0),
        ("alternating", 2 * 7),
        ("own_update", 2 * 6),
        ("frozen_later", 2 * 5),
        ("in_eval_later", 2 * 5),
    ],
)
def test_a_plan_is_the_same_as_with_all_passes(
    name: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortened = traced(name)
    monkeypatch.setattr(trace, "AddedPasses", partial(AddedPasses, is_allowed=False))
    whole = traced(name)
    assert left_out(whole) == 0
    allocated, reserved, seconds = figures(whole)
    assert figures(shortened) == (
        pytest.approx(allocated, rel=1e-6),
        pytest.approx(reserved, rel=1e-6),
        pytest.approx(seconds, rel=1e-4),
    )
    assert left_out(shortened) == expected
