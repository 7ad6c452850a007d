"""Chances of plans are counted on runs that they were not learnt from."""

from __future__ import annotations

import pytest

from scripts import chance_table as script


def test_a_chance_is_a_multiple_of_the_plan_and_back() -> None:
    ratios = [0.95, 1.0, 1.02, 1.1]
    assert script.share_below(script.limit(0.9, ratios), ratios) == pytest.approx(0.9)
    assert script.limit(0.5, ratios) < script.limit(0.9, ratios) < 1.2


def test_every_run_is_judged_by_others_and_counted_once() -> None:
    judgements = list(script.judged())
    learnt = sum(map(len, script.learnt().values()))
    assert sum(len(ratios) for _, by, ratios, _ in judgements if by != "all three") == learnt == 14
    for _, _, ratios, known in judgements:
        assert not set(ratios) & set(known)
    assert len(judgements[-1][2]) == 18
    # one source does not name its way of measuring; and the mean
    assert len(list(script.wide())) == len(judgements)
    text = script.row("some", "others", [0.9, 1.001, 1.5, 3.0], [0.99, 1.0, 1.01])
    assert text == "| some | others | 4 | 1 (25%) | 2 (50%) | 2 (50%) | 2 (50%) |"
