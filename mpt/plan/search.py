"""Which recipe fits a budget and is fastest: precision, memory tricks and micro-batches, tried and not guessed.

Every recipe is the user's configuration with a small patch, built and traced like any other. The search goes from
cheap changes to costly ones: first each precision with each combination of tricks on the whole batch; then
micro-batches, for those combinations that did not fit, since splitting a batch that fits only costs time. What a
configuration refuses (a trick that clashes with another, an optimizer that a mode cannot run) is left out.

The ranking is by predicted time. What a recipe costs in exactness is said, not weighed: the tricks' own `exact`, the
change of precision, and the warnings of the build.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.errors import ConfigError
from mpt.plan.gpus import Gpu
from mpt.plan.session import Answer, Session

TRICKS: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "sqrt"},
    {"recompute": "selective"},
    {"recompute": "all"},
    {"offload_activations": True},
    {"optimizer_in_backward": True},
    {"cpu_optimizer": True},
    {"low_bit_optimizer": True},
    {"recompute": "all", "cpu_optimizer": True},
    {"recompute": "all", "optimizer_in_backward": True},
)
SPLIT_TRICKS: tuple[dict[str, Any], ...] = ({}, {"recompute": "all"}, {"recompute": "all", "cpu_optimizer": True})
"""Combinations that are also tried with micro-batches."""
PARTS = (2, 4, 8)
LAST_RESORT_PARTS = (16, 32)
MASTERLESS = "bf16-pure"
FULL_PRECISION = ("fp32", "tf32", "O0")


@dataclass(frozen=True)
class Recipe:
    """A patch over the user's configuration, and its plan."""

    patch: dict[str, Any]
    config: Config
    answer: Answer

    @property
    def plan(self) -> dict[str, Any]:
        """The plan, empty where there is none."""
        return self.answer.plan

    @property
    def fits(self) -> bool:
        """Whether it fits the budget."""
        return bool(self.plan.get("fits"))

    @property
    def total(self) -> int:
        """Bytes that it takes from the card: held back by the budget where it fits, else what it would like."""
        reserved = self.plan["reserved_in_budget"] if self.fits else self.plan["reserved"]
        return int(reserved + self.plan["context_bytes"])


def describe_patch(patch: Mapping[str, Any]) -> str:
    """Return a patch in a few words: "amp, recompute all, micro-batch 16"."""
    words = [str(patch["precision"]["mode"])] if "precision" in patch else []
    for name, value in patch.get("memory", {}).items():
        words.append(name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {value}")
    return ", ".join(words) or "as it stands"


def describe_cost(recipe: Recipe) -> str:
    """Return what a recipe costs in exactness."""
    costs = []
    if "precision" in recipe.patch:
        costs.append(f"arithmetic of {recipe.patch['precision']['mode']}")
    inexact = [name for name in recipe.plan["inexact"] if name in recipe.patch.get("memory", {})]
    if inexact:
        costs.append(f"not bit-equal: {', '.join(name.replace('_', ' ') for name in inexact)}")
    if any("BatchNorm" in note for note in recipe.plan["notes"]):
        costs.append("BatchNorm sees smaller batches")
    if recipe.plan["tight"]:
        costs.append("empties the cache within a step")
    return "; ".join(costs) or "exact"


def search(session: Session, config: Config, gpu: Gpu, budget_bytes: int) -> tuple[list[Recipe], int]:
    """Return the recipes that could be planned, those that fit and the fastest first; and how many were refused."""
    recipes: list[Recipe] = []
    refused = 0

    def try_all(patches: Sequence[dict[str, Any]]) -> None:
        nonlocal refused
        candidates = [(patch, changed) for patch in patches if (changed := patched(config, patch, session.allow))]
        refused += len(patches) - len(candidates)
        answers = session.plan([changed for _, changed in candidates], budget_bytes=budget_bytes, timeline=True)
        for (patch, changed), answer in zip(candidates, answers, strict=True):
            if answer.error:
                refused += 1
            else:
                recipes.append(Recipe(patch, changed, answer))

    precisions = list(precision_patches(config, gpu))
    try_all([_joined(precision, tricks) for precision in precisions for tricks in TRICKS])
    splits_already = "micro_batch" in config.memory.tricks
    for count in () if splits_already else (*PARTS, *LAST_RESORT_PARTS):
        if count > config.train.batch_size or (count in LAST_RESORT_PARTS and any(r.fits for r in recipes)):
            break
        size = -(-config.train.batch_size // count)
        try_all([_joined(p, {**tricks, "micro_batch": size}) for p, tricks in still_too_large(precisions, recipes)])
    # A tight recipe waits for the driver in every step, which the time model does not know: it comes after the others.
    recipes.sort(key=lambda recipe: (not recipe.fits, recipe.plan["tight"], recipe.plan["step_seconds"]))
    return recipes, refused


def still_too_large(
    precisions: Sequence[dict[str, Any]], recipes: Sequence[Recipe]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the pairs of precision and tricks that fitted neither whole nor split: more parts may help them."""
    fitting = []
    for recipe in recipes:
        if recipe.fits:
            tricks = {name: value for name, value in recipe.patch.get("memory", {}).items() if name != "micro_batch"}
            fitting.append((recipe.patch.get("precision"), tricks))
    return [(p, t) for p in precisions for t in SPLIT_TRICKS if (p.get("precision"), t) not in fitting]


def precision_patches(config: Config, gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Yield no change, then the modes that hold less than the configured one on this GPU."""
    yield {}
    mode = config.precision.mode
    if mode in FULL_PRECISION:
        # Both hold the same bytes; bfloat16 needs no loss scaling, which some tricks refuse.
        yield {"precision": {"mode": "bf16" if gpu.has_bfloat16 else "amp"}}
    if gpu.has_bfloat16 and mode != MASTERLESS:
        yield {"precision": {"mode": MASTERLESS}}


def patched(config: Config, patch: Mapping[str, Any], allow: Sequence[str]) -> Config | None:
    """Return the configuration with a patch over it, or None where it is refused."""
    data = config.to_data()
    for section, changes in patch.items():
        data[section] = {**data[section], **changes}
    if "precision" in patch:
        data["precision"] = {**data["precision"], "dtype": "auto", "loss_scale": "auto"}
    try:
        return load_config(data, allow=allow)
    except ConfigError:
        return None


def _joined(precision: Mapping[str, Any], tricks: Mapping[str, Any]) -> dict[str, Any]:
    return {**precision, **({"memory": dict(tricks)} if tricks else {})}
