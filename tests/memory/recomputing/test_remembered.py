"""Dry runs of one configuration with several budgets: measured once, with the same choices and random numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mpt.memory import recompute
from mpt.memory.recomputing import remembered
from mpt.seams import Run
from tests.engine import parts


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that measured, in order."""
    found: list[str] = []

    def counted(name: str, original: Any) -> Any:
        def measure(run: Run, *others: Any) -> Any:
            found.append(name)
            random.random()  # as a loss may
            return original(run, *others)

        return measure

    for name in ("measure_units", "measure_calls"):
        monkeypatch.setattr(recompute, name, counted(name, getattr(recompute, name)))
    monkeypatch.setattr(remembered, "_figures", {})
    return found


def built(per: str, budget: float, **memory: Any) -> tuple[dict[str, Any], float]:
    run = parts.classifier(memory={"recompute": {"budget": budget, "per": per}, **memory})
    names = {name: vars(module) for name, module in run.task.modules["net"].named_modules()}
    keeps = ("recomputed_keeps", "recomputed_runs")
    return {
        f"{name}.{key}": own.get(key) for name, own in names.items() for key in keeps
    }, random.random()


@pytest.mark.parametrize("per", ["block", "tensor"])
def test_budgets_of_one_configuration_are_measured_once(per: str, measured: list[str]) -> None:
    budgets = (0.7, 0.2)
    without = [built(per, budget) for budget in budgets]
    assert without[0] != without[1]
    once = len(measured) // 2
    with remembered.remembering("a card"):
        assert [built(per, budget) for budget in budgets] == without
        assert 2 * once <= len(measured) < 4 * once
        before = len(measured)
        built(per, 0.2)
        assert len(measured) == before
        built(per, 0.2, release_grads_after=True)  # another configuration
    with remembered.remembering("another card"):
        built(per, 0.2)
    assert len(measured) >= before + 2
