"""Chances of plans are counted on runs that they were not learnt from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpt.planner.facts.verdict import published_ratios
from scripts.plans import chance_table as script


def test_a_chance_is_a_multiple_of_the_plan_and_back() -> None:
    sources = [[0.95, 1.0, 1.02], [1.1]]
    assert script.share_below(script.limit(0.9, sources), sources) == pytest.approx(0.9)
    assert script.limit(0.5, sources) < script.limit(0.9, sources) < 1.2


def test_every_source_is_judged_by_others_and_four_are_held_out_of_all() -> None:
    learnt, judged = published_ratios(), script.judged()
    held_out = {"litgpt": 59, "PEFT": 89, "mmaction2": 37, "aMUSEd": 18}
    assert [*judged] == [*learnt, *held_out]
    assert (len(learnt), sum(map(len, learnt.values()))) == (6, 79)
    for name, ratios in learnt.items():
        assert judged[name][0] is ratios
        assert ratios not in judged[name][1]
        assert len(judged[name][1]) == 5
    for name, runs in held_out.items():
        assert len(judged[name][0]) == runs
        assert len(judged[name][1]) == 6
    assert script.page().count(" at ") == 4 * (10 + 1)


def test_saved_rows_take_the_place_of_those_of_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "published.json"
    file.write_text('[{"source": "a", "run": 1}, {"source": "b", "run": 2}]', "utf-8")
    monkeypatch.setattr(script, "PUBLISHED", file)
    script.save([{"source": "a", "run": 3}, {"source": "c", "run": 4}])
    assert [(row["source"], row["run"]) for row in json.loads(file.read_text("utf-8"))] == [
        ("a", 3),
        ("b", 2),
        ("c", 4),
    ]
