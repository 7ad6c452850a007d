"""What the recipes that are planned so far prove of others: which are needless, and which hopeless.

What is needless, and what hopeless, is defined in `mpt.planner.recipes.search`, which asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from mpt.memory.relieving.relief import reliefs, splitter
from mpt.planner.recipes.patches import is_same_but_for_size
from mpt.planner.recipes.recipe import TIE, Patch, Recipe

HEAVY = 0.3
"""Share of the memory, or of the budget if that is less, without the context, below which moving weights is not
tried.
"""


class Known:
    """The recipes that are planned so far, for a budget, and what follows from them."""

    def __init__(self, budget_bytes: int, allow_lossy: bool) -> None:
        self.budget_bytes, self.allow_lossy = budget_bytes, allow_lossy
        self.recipes: list[Recipe] = []
        self.hopeless: list[Patch] = []
        """Patches proven too large."""

    @property
    def has_fitting(self) -> bool:
        """Whether anything fits so far."""
        return any(one.fits for one in self.recipes)

    def seconds_alone(self, precision: Patch) -> float:
        """Return the time of a step in a precision with no trick; infinite if that is not planned."""
        found = (one for one in self.recipes if not one.tricks)
        seconds = (
            one.plan.step_seconds
            for one in found
            if one.patch.get("precision") == precision.get("precision")
        )
        return min(seconds, default=math.inf)

    def is_heavy(self, precision: Patch) -> bool:
        """Return whether weights, gradients and optimizer state are a large share of the excess, or of the budget."""
        plain = next((one for one in self.recipes if str(one.patch) == str(precision)), None)
        if plain is None or plain.fits_well:
            return False
        room = min(plain.plan.without_assumed, self.budget_bytes) - plain.plan.context_bytes
        return plain.plan.held_throughout >= HEAVY * room

    def is_worth_trying(self, patch: Patch) -> bool:
        """Return whether a patch is neither needless nor hopeless; note the hopeless."""
        if any(
            one.fits_well and one.is_part_of(patch) for one in self.recipes
        ) or self.is_pointless(patch.get("precision")):
            return False
        if any(self.cannot_win(part, patch) for part in self.parts_of(patch)):
            return False
        return not self.is_hopeless(patch)

    def is_hopeless(self, patch: Patch, others: Iterable[Recipe] = ()) -> bool:
        """Return whether other recipes, these among them, prove that a patch does not fit; note it."""
        if any(
            one.proves_hopeless(patch, self.budget_bytes) for one in (*self.recipes, *others)
        ) or self.cannot_shrink(patch):
            self.hopeless.append(patch)
            return True
        return False

    def cannot_shrink(self, patch: Patch) -> bool:
        """Return whether larger micro-batches of this recipe prove that no smaller one fits.

        At every moment of a step bytes are a + b * size, so their peak is convex in the size: the line through two
        sizes, drawn on to a size of 0, lies below the peak of each smaller one.
        """
        size = splitter()
        if size not in patch.get("memory", {}):
            return False
        peaks = {
            one.tricks[size]: one.plan.allocated + one.plan.context_bytes
            for one in self.recipes
            if size in one.tricks and is_same_but_for_size(one.patch, patch)
        }
        if len(peaks) < 2:
            return False
        small, large = sorted(peaks)[:2]
        return bool(
            peaks[small] - (peaks[large] - peaks[small]) * small / (large - small)
            > self.budget_bytes
        )

    def is_pointless(self, precision: Any) -> bool:
        """Return whether more tricks with a precision are pointless for the time they take.

        They are if an exact recipe of it fits well and takes hardly longer than the precision alone, and if the
        precision is outdone by another.
        """
        own = [one for one in self.recipes if one.patch.get("precision") == precision]
        alone = min((one.plan.step_seconds for one in own if not one.tricks), default=0.0)
        quick = (one for one in own if one.is_exact and one.plan.step_seconds <= (1 + TIE) * alone)
        return any(one.fits_well for one in quick) or self.is_outdone(
            {"precision": precision} if precision else {}
        )

    def is_outdone(self, precision: Patch) -> bool:
        """Return whether a precision alone takes longer than a fitting recipe, by more than the time model's band.

        Or if something that changes nothing comes before it and all that takes longer.
        """
        alone = self.seconds_alone(precision)
        if precision and any(
            self.cannot_win(one, precision) for one in self.recipes if one.patch == precision
        ):
            return True
        fitting = (one.plan for one in self.recipes if one.fits_well)
        return alone < math.inf and any(
            plan.step_seconds * (1 + plan.time_band) < alone for plan in fitting
        )

    def cannot_win(self, part: Recipe, patch: Patch) -> bool:
        """Return whether something that fits well comes before a patch, which takes no less time than a part of it.

        It does if it changes no more and takes no longer than the part, since what a patch has in addition to a part,
        or has more of, takes more time. Against something that changes nothing, a patch that changes something has to
        be faster by the band of the time model (`rank`), or by what is left of that with a third one that it ties with.
        """
        limit = (
            *part.harshness[:-2],
            not part.is_exact or self.is_inexact(patch),
            len(patch.get("memory", {})),
        )
        least_band = min(one.plan.time_band for one in self.recipes)
        wide = 1 if self.allow_lossy or not any(limit[:-1]) else (1 + least_band) / (1 + TIE)
        fitting = (one for one in self.recipes if one.traced and one.fits_well)
        return any(
            one.harshness <= limit
            and one.plan.step_seconds
            <= (wide if one.changes_nothing else 1) * part.plan.step_seconds
            for one in fitting
        )

    def is_inexact(self, patch: Patch) -> bool:
        """Return whether a trick of a patch is known to change the order of sums."""
        inexact = {name for one in self.recipes for name in one.plan.inexact}
        return not inexact.isdisjoint(patch.get("memory", {}))

    def parts_of(self, patch: Patch) -> Iterator[Recipe]:
        """Yield the traced parts of a patch that take no longer than it.

        That is not known of one trick for activations and another: what is computed again need not be copied.
        """
        activations = {one.name for one in reliefs("activations")}
        for one in self.recipes:
            both = one.tricks.keys() | patch.get("memory", {}).keys()
            if (
                one.traced
                and one.is_part_of(patch)
                and (activations.isdisjoint(one.tricks) or len(activations & both) == 1)
            ):
                yield one
