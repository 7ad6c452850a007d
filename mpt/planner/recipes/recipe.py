"""A recipe: a patch over a configuration with its plan; its cost, in words, and in which order recipes come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mpt.config.schema import Config
from mpt.config.sizes import describe_bytes
from mpt.memory.relieving.relief import KINDS, reliefs, splitter
from mpt.planner.answers.plan import Plan
from mpt.planner.facts.verdict import SURE, fits_surely
from mpt.planner.recipes.lighter_modes import is_lossy

Patch = dict[str, Any]
TIE = 0.06
"""How far the time model was off when it ranked published runs of one model."""
NEAR = 1.06
"""Times and sizes that differ by less than this factor are shown once."""


@dataclass(frozen=True)
class Recipe:
    """A patch over the user's configuration, and its plan."""

    patch: Patch
    config: Config
    plan: Plan
    traced: bool = True
    """False if another recipe's trace was replayed."""

    @property
    def fits(self) -> bool:
        """Whether it fits the budget."""
        return bool(self.plan.fits)

    @property
    def is_close(self) -> bool:
        """Whether it fits, but by so little that it only may (`mpt.planner.facts.verdict`)."""
        return self.fits and not self.plan.tight and not fits_surely(self.plan)

    @property
    def fits_well(self) -> bool:
        """Whether it fits with room to spare and without emptying the cache in the middle of a step."""
        return self.fits and fits_surely(self.plan)

    @property
    def total(self) -> int:
        """Bytes that it takes from the card: held back by the budget if it fits, else the whole."""
        return self.plan.total

    @property
    def tricks(self) -> dict[str, Any]:
        """The patch's memory tricks."""
        return dict(self.patch.get("memory", {}))

    @cached_property
    def harshness(self) -> tuple[bool, bool, bool, int]:
        """How much a recipe changes: the learned result, then arithmetic, then exactness, then the number of tricks."""
        return self.is_lossy, "precision" in self.patch, not self.is_exact, len(self.tricks)

    @property
    def is_exact(self) -> bool:
        """Whether its memory tricks leave every gradient as it was, to the bit."""
        return not any(name in self.tricks for name in self.plan.inexact)

    @cached_property
    def is_lossy(self) -> bool:
        """Whether it changes the learned result: weights without float32 masters, optimizer states in fewer bits."""
        return changes_what_is_learnt(self.patch)

    @property
    def changes_nothing(self) -> bool:
        """Whether it computes the same numbers, to the bit."""
        return "precision" not in self.patch and self.is_exact

    def fits_like(self, other: Recipe) -> bool:
        """Whether two recipes fit equally well, or neither does."""
        return (self.fits, self.fits_well) == (other.fits, other.fits_well)

    def proves_hopeless(self, patch: Patch, budget_bytes: int) -> bool:
        """Whether the weights, gradients and optimizer state that this recipe shares with a patch are too much.

        Gradients, which some tricks release, take no more than the weights.
        """
        held = self.plan.context_bytes + self.plan.held_throughout
        if held <= budget_bytes or self.patch.get("precision") != patch.get("precision"):
            return False
        leave_weights = {one.name for one in reliefs("activations", "batch")}
        own, other = (
            {name: value for name, value in tricks.items() if name not in leave_weights}
            for tricks in (self.tricks, patch.get("memory", {}))
        )
        if own == other:
            return True
        release = {one.name for one in reliefs("gradients")}
        gradients = max(self.plan.by_category.get(name, 0) for name in ("gradients", "parameters"))
        return held - gradients > budget_bytes and own == {
            name: value for name, value in other.items() if name not in release
        }

    def is_part_of(self, patch: Patch) -> bool:
        """Whether a patch has this precision and these tricks, in no larger a batch, and perhaps more."""
        return is_part(self.patch, patch)


def is_part(part: Mapping[str, Any], patch: Mapping[str, Any]) -> bool:
    """Return whether a patch has a part's precision and tricks, in no larger a batch, and perhaps more."""
    wanted, size = patch.get("memory", {}), splitter()
    return part.get("precision") == patch.get("precision") and all(
        wanted.get(name, 0) <= value
        if name == size and name in wanted
        else wanted.get(name) == value
        for name, value in part.get("memory", {}).items()
    )


def changes_what_is_learnt(patch: Mapping[str, Any]) -> bool:
    """Return whether a patch's precision or one of its memory tricks is lossy."""
    lossy = {one.name for one in reliefs(*KINDS) if one.is_lossy}
    return is_lossy(patch.get("precision", {}).get("mode")) or not lossy.isdisjoint(
        patch.get("memory", {})
    )


def describe_patch(patch: Mapping[str, Any]) -> str:
    """Return a patch in a few words: "amp, recompute all, micro-batch 16"."""
    words = [str(patch["precision"]["mode"])] if "precision" in patch else []
    for name, value in patch.get("memory", {}).items():
        settings = (
            value.items()
            if isinstance(value, Mapping)
            else [("", value)]
            if value is not True
            else []
        )
        spoken = [describe_setting(key, one) for key, one in settings]
        words.append(" ".join([name.replace("_", " "), *spoken]))
    return ", ".join(words) or "as it stands"


def describe_setting(key: str, value: Any) -> str:
    """Return a trick's setting in words; gibibytes in the unit that a plan's bytes are in."""
    if key.endswith("_gib") and isinstance(value, int | float):
        key, value = key.removesuffix("_gib"), describe_bytes(value * 2**30)
    return f"{key} {value}".replace("_", " ").strip()


def describe_cost(recipe: Recipe) -> str:
    """Return a recipe's cost in the words of EXPLANATIONS; "exact" for nothing."""
    costs = ["lossy"] if recipe.is_lossy else []
    if "precision" in recipe.patch:
        costs.append(f"{recipe.patch['precision']['mode']} arithmetic")
    if not recipe.is_exact:
        costs.append("not bit-equal")
    if any("BatchNorm" in note for note in recipe.plan.notes):
        costs.append("BatchNorm")
    if recipe.plan.tight:
        costs.append("tight")
    elif recipe.is_close:
        costs.append("close")
    return ", ".join(costs) or "exact"


EXPLANATIONS = {
    "lossy": "the learned result changes, beyond rounding: compare before you rely on it",
    "not bit-equal": "sums in another order: close to the run without it, not the same",
    "BatchNorm": "its statistics come from the smaller batches, so training differs",
    "tight": "fits only by handing cached memory back in every step, which takes longer than the time shown",
    "close": f"may fit: fewer than {SURE:.0%} of published runs stayed within such a margin",
    "expandable segments": "a setting of the CUDA allocator on Linux; results and times are the same",
}


def rank(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Return recipes in the order of recommendation: those that fit well, those that just fit, the rest.

    Within each the fastest come first; among those within the time model's error of the fastest, the gentlest. One that
    changes nothing, or is not lossy if the fastest is, is preferred until the gain exceeds the band of the time
    model. A tight recipe waits for the driver in every step, which the time model does not know.
    """
    left = sorted(recipes, key=lambda one: (not one.fits_well, not one.fits, one.plan.step_seconds))
    ordered: list[Recipe] = []
    while left:
        head = left[0]
        limit = head.plan.step_seconds * (1 + TIE)
        wide = head.plan.step_seconds * (1 + head.plan.time_band)
        equals = [
            one
            for one in left
            if one.fits_like(head)
            and one.plan.step_seconds <= (wide if is_preferred(one, head) else limit)
        ]
        ordered.append(min(equals, key=lambda one: one.harshness))
        left.remove(ordered[-1])
    return ordered


def is_preferred(one: Recipe, head: Recipe) -> bool:
    """Return whether a recipe is worth more time than another: it changes nothing, or at least not the learned
    result."""
    return (one.changes_nothing and not head.changes_nothing) or (
        head.is_lossy and not one.is_lossy
    )


def worth_showing(ranked: list[Recipe]) -> list[Recipe]:
    """Leave out recipes that come after a gentler one and save next to nothing, neither time nor memory."""
    shown: list[Recipe] = []
    for recipe in ranked:
        if not any(is_better(one, recipe) for one in shown):
            shown.append(recipe)
    return shown


def is_better(one: Recipe, other: Recipe) -> bool:
    """Return whether a recipe is no harsher than another, and hardly slower or larger."""
    return (
        one.harshness <= other.harshness
        and one.plan.step_seconds <= NEAR * other.plan.step_seconds
        and one.total <= NEAR * other.total
    )


def without_conflicts(overrides: Iterable[str], patch: Mapping[str, Any]) -> list[str]:
    """Return the command line's overrides that leave a patch as it is; an override would win over a patch's file."""
    leaves = [f"{section}.{name}." for section, values in patch.items() for name in values]
    keys = {override: override.partition("=")[0].strip() + "." for override in overrides}
    return [
        override
        for override, key in keys.items()
        if not any(leaf.startswith(key) or key.startswith(leaf) for leaf in leaves)
    ]
