"""A number of a trick that the search looks for by bisection, such as the share of activations that may stay."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mpt.config.relief import Dial
from mpt.planner.facts.verdict import sure_share
from mpt.planner.recipes.patches import joined
from mpt.planner.recipes.recipe import Patch, Recipe

TRIES = 4
"""Values of a dial that are planned at most."""
STEP = 0.125
"""Share of a dial that a block may be: where two values give the same, no less is looked through."""
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
    fastest: float | None = None
    """Seconds of the fastest recipe that fits well."""
    tried: int = 0
    outcomes: list[bool] = field(default_factory=list)
    """Whether each planned value fits well."""
    seen: list[tuple[int, float]] = field(default_factory=list)
    """Bytes and seconds of each."""

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
        self.outcomes.append(recipe.fits_well)
        if recipe.fits_well:
            self.fastest = min(self.fastest or math.inf, recipe.plan.step_seconds)
        if recipe.fits_well and (
            self.fitting is None or nearer < abs(self.fitting[0] - self.dial.least)
        ):
            self.fitting = value, recipe.plan.without_assumed
        elif not recipe.fits_well and nearer > abs(self.too_large[0] - self.dial.least):
            self.too_large, self.part = (value, recipe.plan.without_assumed), recipe
        figures = recipe.plan.without_assumed, recipe.plan.step_seconds
        left = abs((self.fitting or self.too_large)[0] - self.too_large[0])
        if figures in self.seen and left < STEP * abs(self.most - self.dial.least):
            self.tried = TRIES  # whole blocks move, and hardly one between these values
        self.seen.append(figures)

    def next_value(self) -> float | None:
        """Return the value to try next; None if there is none that is worth a trace.

        It is the one at which a line meets the budget, or the middle if the last two were both too gentle, or both too
        strong: memory is not quite on a line.
        """
        if self.fitting is None or self.tried == TRIES:
            return None
        (good, small), (bad, large) = self.fitting, self.too_large
        budget = self.plain.plan.budget * sure_share()
        if small > NEAR * budget:
            return None
        share = min(0.9, max(0.1, (budget - small) / (large - small))) if large > small else 0.5
        if len(self.outcomes) > 1 and self.outcomes[-1] == self.outcomes[-2]:
            share = 0.5
        value = good + share * (bad - good)
        known = [self.dial.settings(one) for one in (good, bad)]
        return None if self.dial.settings(value) in known else value
