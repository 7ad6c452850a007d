"""A number of a trick that the search looks for by bisection, such as the share of activations that may stay."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mpt.memory.relieving.relief import Dial
from mpt.planner.answers.plan import Plan
from mpt.planner.facts.verdict import sure_share
from mpt.planner.recipes.patches import joined
from mpt.planner.recipes.recipe import Patch, Recipe

TRIES = 4
"""Values of a dial that are planned at most."""
STEP = 0.125
"""Share of a dial that a block may be: where two values give the same, or most of a step of memory lies between two
that are as near, no less is looked through.
"""
STEEP = 2.0
"""Times what a line over the whole dial says of two near values: more between them is a block, in one piece."""
NEAR = 0.97
"""Of the bytes that fit well: a recipe that takes as much is gentle enough."""


@dataclass
class Turn:
    """A dial being turned: between `most`, which has to fit, and the configuration without it, which does not."""

    precision: Patch
    trick: str
    dial: Dial
    plain: Recipe
    strongest: Recipe | None
    """The trick's strongest proposal; if it does not fit well there is nothing to find."""
    fitting: tuple[float, int] | None = None
    """The gentlest value that fits well, and its bytes."""
    tried: int = 0
    recipes: list[Recipe] = field(default_factory=list)
    """Of the values that could be planned, in order."""
    is_flat: bool = False
    """Whether hardly a block more or less moves between what fits and what does not."""

    def __post_init__(self) -> None:
        self.most = self.dial.end(
            {name: size / 2**30 for name, size in self.plain.plan.by_category.items()}
        )
        self.too_large: tuple[float, int] = self.dial.least, self.plain.plan.without_assumed
        self.part = self.plain
        """The recipe of that value: those that fit relieve more, and so take longer."""
        self.is_exact = self.strongest is not None and self.strongest.is_exact
        if self.strongest is not None and self.strongest.fits_well:
            self.fitting = self.most, self.strongest.plan.without_assumed

    def patch(self, value: float) -> Patch:
        """Return the patch with a value."""
        return joined(self.precision, {self.trick: self.dial.settings(value)})

    def note(self, value: float, recipe: Recipe | None) -> None:
        """Take a value's plan into account."""
        self.tried += 1
        if recipe is None:
            return
        nearer = abs(value - self.dial.least)
        if recipe.fits_well and (
            self.fitting is None or nearer < abs(self.fitting[0] - self.dial.least)
        ):
            self.fitting = value, recipe.plan.without_assumed
        elif not recipe.fits_well and nearer > abs(self.too_large[0] - self.dial.least):
            self.too_large, self.part = (value, recipe.plan.without_assumed), recipe
        (good, small), (bad, large) = self.fitting or self.too_large, self.too_large
        left = abs(good - bad) / abs(self.most - self.dial.least)
        if left < STEP:
            self.is_flat = large - small > STEEP * left * self.moved or any(
                is_alike(recipe.plan, other.plan) for other in self.recipes
            )
        self.recipes.append(recipe)

    @property
    def moved(self) -> int:
        """Bytes between the plans of the dial's two ends."""
        assert self.strongest is not None
        return self.plain.plan.without_assumed - self.strongest.plan.without_assumed

    @property
    def fastest(self) -> float:
        """Seconds of the fastest recipe that fits well, infinite if none does."""
        fitting = (recipe for recipe in self.recipes if recipe.fits_well)
        return min((recipe.plan.step_seconds for recipe in fitting), default=math.inf)

    def next_value(self) -> float | None:
        """Return the value to try next; None if there is none that is worth a trace.

        It is the one at which a line meets the budget, or the middle if the last two were both too gentle, or both too
        strong: memory is not quite on a line.
        """
        if self.fitting is None or self.tried == TRIES or self.is_flat:
            return None
        (good, small), (bad, large) = self.fitting, self.too_large
        budget = self.plain.plan.budget * sure_share()
        if small > NEAR * budget:
            return None
        share = min(0.9, max(0.1, (budget - small) / (large - small))) if large > small else 0.5
        if len({recipe.fits_well for recipe in self.recipes[-2:]}) == 1 < len(self.recipes):
            share = 0.5
        value = good + share * (bad - good)
        known = [self.dial.settings(one) for one in (good, bad)]
        return None if self.dial.settings(value) in known else value


def is_alike(plan: Plan, other: Plan) -> bool:
    """Return whether two plans hold as many bytes and take as long."""
    return (plan.without_assumed, plan.step_seconds) == (other.without_assumed, other.step_seconds)
