"""The fastest recipe for each usual size of card.

One set of traces serves all sizes: they differ in the budget alone, the part of such a card that programs can have
(`mpt.planner.facts.gpus`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mpt.config.schema import Config
from mpt.errors import MemoryBudgetError
from mpt.planner.client.processes import count_workers
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import load_calibration
from mpt.planner.facts.gpus import Gpu
from mpt.planner.recipes.planned import needs_search
from mpt.planner.recipes.recipe import Recipe, describe_cost
from mpt.planner.recipes.search import search

SIZES = (6, 8, 10, 12, 16, 24)
"""GB that cards are sold with."""
REFERENCE = "rtx2060"


@dataclass(frozen=True)
class Preset:
    """The recipe for a size of card; None if nothing fits."""

    size_gb: int
    budget_bytes: int
    recipe: Recipe | None
    path: Path | None = None


def usable_bytes(gpu: Gpu, size_gb: int) -> int:
    """Return the usable memory of a card of this size."""
    return replace(gpu, name="", memory_gib=size_gb, is_installed=False).usable_bytes


def find_presets(
    config: Config,
    gpu: Gpu,
    *,
    allow_lossy: bool = False,
    on_answer: Callable[[int, int], None] = lambda planned, fitting: None,
) -> list[Preset]:
    """Return the first recipe for every size."""
    budgets = {size: usable_bytes(gpu, size) for size in SIZES}
    calibration, found = load_calibration(gpu.name), []
    with Session(
        gpu, calibration, config.granted, count_workers(), budgets=tuple(budgets.values())
    ) as session:
        for size, budget in reversed(budgets.items()):
            recipes: Sequence[Recipe] = ()
            with contextlib.suppress(MemoryBudgetError):  # the weights alone are too much
                recipes = search(
                    session,
                    config,
                    gpu,
                    budget,
                    allow_lossy=allow_lossy,
                    goes_on=partial(needs_search, budget),
                    on_answer=on_answer,
                ).recipes
            found.append(Preset(size, budget, next((one for one in recipes if one.fits), None)))
    return found[::-1]


def preset_as_data(preset: Preset) -> dict[str, object]:
    """Return a preset as JSON has it."""
    common: dict[str, object] = {"size_gb": preset.size_gb, "budget_bytes": preset.budget_bytes}
    if preset.recipe is None:
        return {**common, "patch": None, "path": None}
    plan = preset.recipe.plan
    return {
        **common,
        "patch": preset.recipe.patch,
        "total_bytes": preset.recipe.total,
        "step_seconds": plan.step_seconds,
        "cost": describe_cost(preset.recipe),
        "path": None if preset.path is None else str(preset.path),
    }
