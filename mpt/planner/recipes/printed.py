"""Output of `mpt plan --json`, and its JSON Schema: `mpt schema --plan`. Torch is not imported.

The plan is the planner's own (`mpt.planner.answers.plan`); additions for the reader are here. Nothing is left open:
a field that is not declared is refused, so that a test finds undeclared additions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from mpt.planner.answers.plan import READ, Plan, without_absent
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import Gpu
from mpt.planner.facts.verdict import judge
from mpt.planner.recipes.recipe import Recipe, describe_cost
from mpt.planner.recipes.search import Search

Patch = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PrintedPlan(Plan):
    """A configuration's plan."""

    timeline: Annotated[dict[str, list[int]], Field(exclude=True)] = field(default_factory=dict)
    verdict: Literal["fits", "may fit", "does not fit"] | None
    """null without a budget."""
    chance: float | None
    """That the run stays within the budget, by the errors of published runs."""


@dataclass(frozen=True, kw_only=True)
class PrintedRecipe(PrintedPlan):
    """A patch over the configuration, and its plan. The first that fits is the one recommended."""

    patch: Patch
    cost: str
    """"exact", or its changes."""
    lossy: bool
    """It changes the learned result, beyond rounding; with --allow-lossy only."""
    total_bytes: int
    """Taken from the card."""
    traced: bool
    """false if another recipe's trace was replayed."""


@dataclass(frozen=True)
class Refused:
    """A patch that the configuration or the planner refuses."""

    patch: Patch
    reason: str


@dataclass(frozen=True)
class PlanOutput:
    """Output of `mpt plan CONFIG --json`: bytes and seconds throughout."""

    __pydantic_config__: ClassVar[ConfigDict] = READ

    gpu: Gpu
    calibration: Calibration
    plan: PrintedPlan
    """The configuration unchanged."""
    recipes: list[PrintedRecipe]
    """With --vram, in the order of recommendation."""
    refused: list[Refused]
    hopeless: list[Patch]
    """Patches proven too large by the memory of other recipes."""
    written: list[str]
    """Files."""

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        data: dict[str, Any] = TypeAdapter(PlanOutput).dump_python(self)
        for plan in (data["plan"], *data["recipes"]):
            without_absent(plan)
        return data


def as_data(
    gpu: Gpu, calibration: Calibration, plan: Plan, found: Search, written: list[str]
) -> dict[str, Any]:
    """Return everything as JSON can hold it, pictures' curves aside."""
    output = PlanOutput(
        gpu=gpu,
        calibration=calibration,
        plan=with_verdict(plan),
        recipes=[describe_recipe(recipe) for recipe in found.recipes],
        refused=[Refused(patch, reason) for patch, reason in found.refused],
        hopeless=found.hopeless,
        written=written,
    )
    return output.as_data()


def with_verdict(plan: Plan) -> PrintedPlan:
    """Return a plan with its class and chance."""
    return PrintedPlan(**vars(plan), **verdict_of(plan))


def describe_recipe(recipe: Recipe) -> PrintedRecipe:
    """Return a recipe as JSON has it."""
    return PrintedRecipe(
        **vars(recipe.plan),
        **verdict_of(recipe.plan),
        patch=recipe.patch,
        cost=describe_cost(recipe),
        lossy=recipe.is_lossy,
        total_bytes=recipe.total,
        traced=recipe.traced,
    )


def verdict_of(plan: Plan) -> dict[str, Any]:
    """Return a plan's class and chance; null without a budget."""
    found = judge(plan)
    return {
        "verdict": found.kind if found else None,
        "chance": round(found.chance, 3) if found else None,
    }


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema."""
    schema = TypeAdapter(PlanOutput).json_schema(mode="serialization") | {
        "title": "mpt plan --json"
    }
    for declared in (schema, *schema["$defs"].values()):
        declared["additionalProperties"] = False
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
