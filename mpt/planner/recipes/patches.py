"""The patches that the search tries: lighter precision modes, and the tricks' own proposals alone and together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpt.config.checking.layers import write_override
from mpt.config.load import change_precision, load_config
from mpt.config.schema import Config
from mpt.memory.relieving.relief import Relief, reliefs, splitter
from mpt.planner.facts.gpus import Gpu
from mpt.planner.recipes.lighter_modes import holds_float32, lighter_modes
from mpt.planner.recipes.recipe import Patch


@dataclass(frozen=True)
class Combinations:
    """The combinations of memory tricks that are tried, from the declarations of the tricks' files
    (`mpt.memory.relieving.relief`)."""

    single: tuple[Patch, ...]
    """No trick, and each proposal alone."""
    pairs: tuple[Patch, ...]
    """A trick for activations and one for the optimizer, or the strongest of two for activations."""
    split: tuple[Patch, ...]
    """Tricks that are also tried with micro-batches: the strongest for activations, one for states, both, none."""
    weights: tuple[Patch, ...] = ()
    """Tricks that keep weights elsewhere, tried if weights are a large share of the excess."""
    beside_weights: tuple[Patch, ...] = ()
    """The strongest for activations and that."""
    split_weights: tuple[Patch, ...] = ()
    """Tricks that are also tried with micro-batches then: those, alone and with the strongest for activations."""


def combinations(allow_lossy: bool = True) -> Combinations:
    """Return the patches to try with the known tricks."""
    splitting = reliefs("batch")[0]
    activations, optimizers, weights = (
        [one for one in reliefs(*kinds) if one.proposals and (allow_lossy or not one.is_lossy)]
        for kinds in (("activations",), ("gradients", "optimizer"), ("weights",))
    )
    splittable = [one for one in activations if works_split(one, splitting)]
    split_optimizers = each(one for one in optimizers if works_split(one, splitting))
    split_weights = [one for one in weights if works_split(one, splitting)]
    return Combinations(
        single=({}, *each(activations), *each(optimizers)),
        pairs=(
            *both(each(activations), each(optimizers)),
            *strongest_together(itertools.combinations(activations, 2)),
        ),
        weights=tuple(each(weights)),
        beside_weights=tuple(strongest_together(itertools.product(activations, weights))),
        split_weights=(
            *map(strongest, split_weights),
            *strongest_together(itertools.product(splittable, split_weights)),
        ),
        split=(
            {},
            *map(strongest, splittable),
            *split_optimizers,
            *both(map(strongest, splittable), split_optimizers),
        ),
    )


def works_split(trick: Relief, splitting: Relief) -> bool:
    """Return whether a trick works on micro-batches."""
    return trick.in_parts and trick.suits(splitting)


def each(tricks: Iterable[Relief]) -> list[Patch]:
    """Return every proposal of some tricks."""
    return [{one.name: value} for one in tricks for value in one.proposals]


def strongest(trick: Relief) -> Patch:
    """Return a trick's last proposal, which holds least."""
    return {trick.name: trick.proposals[-1]}


def strongest_together(pairs: Iterable[tuple[Relief, Relief]]) -> list[Patch]:
    """Return the strongest of both tricks, for each pair that may be combined."""
    return [
        {**strongest(first), **strongest(second)} for first, second in pairs if first.suits(second)
    ]


def both(some: Iterable[Patch], others: Sequence[Patch]) -> list[Patch]:
    """Return each patch of some together with each of others, as far as their tricks may be combined."""
    return [{**first, **second} for first in some for second in others if suit(first, second)]


def suit(first: Patch, second: Patch) -> bool:
    """Return whether the tricks of two patches may be combined."""
    known = {one.name: one for one in reliefs("activations", "gradients", "optimizer")}
    return all(known[one].suits(known[other]) for one in first for other in second)


def precision_patches(config: Config, gpu: Gpu, allow_lossy: bool = True) -> Iterator[Patch]:
    """Yield no change, then the modes that hold less than the configured one on this GPU."""
    yield {}
    mode = config.precision.mode
    for lighter in (
        *(lighter_modes(lossy=False) if holds_float32(mode) else ()),
        *(lighter_modes(lossy=True) if allow_lossy else ()),
    ):
        name = lighter.usable(gpu.has_bfloat16)
        if name is not None and name != mode:
            yield {"precision": mode_patch(config, name)}


def mode_patch(config: Config, mode: str) -> Patch:
    """Return a patch that changes the mode, also over a file that sets a dtype or a loss scale."""
    given, default = (
        one.to_data()["precision"]
        for one in (config, change_precision(config, config.precision.mode))
    )
    patch: Patch = {"mode": mode}
    if given != default:
        new = change_precision(config, mode).to_data()["precision"]
        patch.update({name: new[name] for name in ("dtype", "loss_scale") if name in new})
    return patch


def patched(config: Config, patch: Mapping[str, Any], allow: Sequence[str]) -> Config:
    """Return the configuration as it is with a patch laid over its file. Raises ConfigError if it is refused."""
    if "precision" in patch:
        config = change_precision(config, patch["precision"]["mode"])
    overrides = [
        write_override(f"memory.{name}", value) for name, value in patch.get("memory", {}).items()
    ]
    return load_config(config.to_data(), overrides, allow=allow)


def parted(config: Config, parts: int) -> Patch:
    """Return the trick that splits the batch into that many micro-batches."""
    return {splitter(): -(-config.train.batch_size // parts)}


def is_same_but_for_size(one: Patch, other: Patch) -> bool:
    """Return whether two patches differ in the micro-batch's size alone."""
    return joined(one, {splitter(): 0}) == joined(other, {splitter(): 0})


def has_same_tricks(one: Patch, other: Patch) -> bool:
    """Return whether two patches have one precision and the same tricks, perhaps with other settings."""
    return one.get("precision") == other.get("precision") and (
        one.get("memory", {}).keys() == other.get("memory", {}).keys()
    )


def joined(patch: Mapping[str, Any], tricks: Mapping[str, Any]) -> Patch:
    """Return a patch with more memory tricks in it."""
    return {**patch, "memory": {**patch.get("memory", {}), **tricks}} if tricks else dict(patch)
