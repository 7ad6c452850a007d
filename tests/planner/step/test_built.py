"""A run whose networks alone exceed the budget is not stepped in a search."""

from __future__ import annotations

from mpt.config.load import load_config
from mpt.errors import MemoryBudgetError
from mpt.planner.client.session import Session


def test_networks_that_exceed_the_budget_end_the_plan_before_any_step(session: Session) -> None:
    config = load_config(
        {"model": "small_cnn", "dataset": "digits", "train": {"batch_size": 8, "steps": 1}}
    )
    plan = session.plan([config])[0].get()
    weights = plan.by_category["parameters"]
    asked = {"only_if_built_fits": True}
    (small,) = session.plan([config], budget_bytes=plan.context_bytes + weights // 2, **asked)
    assert small.exit_code == MemoryBudgetError.exit_code
    assert small.error.startswith("built, and before any step, it holds")
    (larger,) = session.plan([config], budget_bytes=plan.context_bytes + 2 * weights, **asked)
    assert larger.get().fits is False
    (plain,) = session.plan([config], budget_bytes=plan.context_bytes + weights // 2)
    assert plain.get().fits is False
