"""Three classes: what fits, what may, what does not, with a chance learnt from published measurements."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from mpt.config.load import load_config
from mpt.planner.answers.plan import Plan
from mpt.planner.facts.verdict import (
    PUBLISHED,
    SURE,
    Verdict,
    bell_width,
    chance_of,
    judge,
    published_ratios,
    share_below,
    sure_share,
)
from mpt.planner.recipes.planned import needs_search
from mpt.planner.recipes.recipe import Recipe, rank
from scripts.plans.chance_table import PAGES, page_rows
from tests.planner.made_plans import make_plan

PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "plan_published.md"


def plan(reserved: int, budget: int = 1000, **changes: Any) -> Plan:
    """Return a plan for a budget."""
    values = {
        "fits": reserved <= budget,
        "reserved": reserved,
        "allocated": reserved - 50,
        "budget_bytes": budget,
    }
    return make_plan(**{**values, **changes})


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (plan(800), "fits"),
        (plan(990), "may fit"),
        (plan(1100, fits=True, tight=True, allocated=800), "may fit"),
        (plan(1010), "does not fit"),
        (plan(2000), "does not fit"),
    ],
)
def test_the_classes_follow_the_margin_and_the_cache(given: Plan, kind: str) -> None:
    found = judge(given)
    assert found is not None
    assert found.kind == kind


def test_the_chance_grows_with_the_margin_and_is_that_of_the_published_runs() -> None:
    chances = [chance_of(1000, budget) for budget in (900, 980, 1000, 1030, 1060, 1200)]
    assert chances == sorted(chances)
    assert chances[0] < 0.1
    assert chances[-1] > 0.99
    sources = published_ratios().values()
    for margin in (1.0, 1.02, 1.05):
        stayed = fmean(sum(ratio <= margin for ratio in ratios) / len(ratios) for ratios in sources)
        assert abs(chance_of(10_000, int(10_000 * margin)) - stayed) < 0.2
    assert 0 < bell_width(tuple(ratio for ratios in sources for ratio in ratios)) < 0.05


def test_each_source_counts_the_same_however_many_runs_it_has() -> None:
    below, above = [0.90, 0.91], [1.10, 1.11] * 10
    assert share_below(1.0, [below, above]) == pytest.approx(0.5, abs=0.1)
    assert share_below(1.0, [below, below, above]) > 0.6


def test_a_recipe_that_only_may_fit_comes_after_one_that_fits_and_calls_for_a_search() -> None:
    config = load_config({"model": "small_cnn", "dataset": "digits"})
    close, sure = (
        Recipe({"memory": {name: True}}, config, plan(size, step_seconds=seconds))
        for name, size, seconds in (("empty_cache_every", 958, 1.0), ("recompute", 920, 1.2))
    )
    assert (close.is_close, close.fits, close.fits_well, sure.fits_well) == (
        True,
        True,
        False,
        True,
    )
    assert rank([close, sure]) == [sure, close]
    assert needs_search(1000, plan(958))
    assert not needs_search(1000, plan(920))
    assert (
        chance_of(int(1e6 * sure_share()), int(1e6))
        >= SURE
        > chance_of(int(1e6 * (sure_share() + 0.002)), int(1e6))
    )


def test_nine_in_ten_are_not_printed_of_what_only_may_fit() -> None:
    assert [Verdict("may fit", chance).percent for chance in (0.8996, 0.001, 1.0)] == [89, 1, 99]


def test_no_budget_has_no_verdict() -> None:
    assert judge(plan(1, fits=None, budget_bytes=None)) is None


def test_what_is_learnt_from_stands_in_the_documentation() -> None:
    page = PAGE.read_text("utf-8")
    rows = json.loads(PUBLISHED.read_text("utf-8"))
    others = page_rows()
    assert [row for row in rows if row in others] == others
    for row in rows:
        if row["source"] not in PAGES:
            assert f"| {row['run']} | {row['measured_mib']} | {row['planned_mib']} |" in page
