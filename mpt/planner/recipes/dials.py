"""A number of a trick that the search looks for by bisection, such as the share of activations that may stay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpt.config.relief import Dial
from mpt.planner.facts.verdict import sure_share
from mpt.planner.recipes.patches import joined
from mpt.planner.recipes.recipe import Patch, Recipe


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
        if recipe is None:
            return
        nearer = abs(value - self.dial.least)
        if recipe.fits_well:
            self.fastest = min(self.fastest or math.inf, recipe.plan.step_seconds)
        if recipe.fits_well and (
            self.fitting is None or nearer < abs(self.fitting[0] - self.dial.least)
        ):
            self.fitting = value, recipe.plan.without_assumed
        elif not recipe.fits_well and nearer > abs(self.too_large[0] - self.dial.least):
            self.too_large, self.part = (value, recipe.plan.without_assumed), recipe

    def next_values(self) -> list[float]:
        """Return the values to try next: the one at which a line meets the budget, and halfway to one that is too
        large."""
        if self.fitting is None:
            return []
        (good, small), (bad, large) = self.fitting, self.too_large
        budget = self.plain.plan.budget * sure_share()
        share = min(0.9, max(0.1, (budget - small) / (large - small))) if large > small else 0.5
        values = [good + part * (bad - good) for part in (share, (1 + share) / 2)]
        known = [self.dial.settings(value) for value in (good, bad)]
        return [value for value in values if self.dial.settings(value) not in known]
