"""The patches that the search tries: lighter precision modes, and the tricks' own proposals alone and together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpt.config.layers import write_override
from mpt.config.lighter_modes import holds_float32, lighter_modes
from mpt.config.load import change_precision, load_config
from mpt.config.relief import Relief, reliefs, splitter
from mpt.config.schema import Config
from mpt.planner.facts.gpus import Gpu
from mpt.planner.recipes.recipe import Patch


@dataclass(frozen=True)
class Combinations:
    """The combinations of memory tricks that are tried, from what the tricks' files declare (`mpt.config.relief`)."""

    single: tuple[Patch, ...]
    """No trick, and each proposal alone."""
    pairs: tuple[Patch, ...]
    """A trick for activations and one for the optimizer, or the strongest of two for activations."""
    split: tuple[Patch, ...]
    """What is also tried with micro-batches: the strongest for activations, one for the optimizer, both, neither."""
    weights: tuple[Patch, ...] = ()
    """What keeps weights elsewhere, tried where they are much of what does not fit."""
    beside_weights: tuple[Patch, ...] = ()
    """The strongest for activations and that."""
    split_weights: tuple[Patch, ...] = ()
    """What is also tried with micro-batches there: that, alone and beside the strongest for activations."""


def combinations(allow_lossy: bool = True) -> Combinations:
    """Return what is tried with the tricks that there are."""
    splitting = reliefs("batch")[0]
    activations, optimizers, weights = (
        [one for one in reliefs(kind) if allow_lossy or not one.is_lossy]
        for kind in ("activations", "optimizer", "weights")
    )
    parted = [one for one in activations if one.proposals and one.in_parts and one.suits(splitting)]
    with_parts = [one for one in optimizers if one.in_parts and one.suits(splitting)]
    return Combinations(
        single=({}, *each(activations), *each(optimizers)),
        pairs=(
            *({**first, **second} for first in each(activations) for second in each(optimizers) if suit(first, second)),
            *(
                {first.name: first.proposals[-1], second.name: second.proposals[-1]}
                for first, second in itertools.combinations(activations, 2)
                if first.proposals and second.proposals and first.suits(second)
            ),
        ),
        weights=tuple(each(weights)),
        beside_weights=tuple(
            {first.name: first.proposals[-1], second.name: second.proposals[-1]}
            for first in activations
            for second in weights
            if first.proposals and first.suits(second)
        ),
        split_weights=tuple(
            {**({one.name: one.proposals[-1]} if one is not None else {}), second.name: second.proposals[-1]}
            for one in (None, *parted)
            for second in weights
            if second.in_parts and second.suits(splitting) and (one is None or one.suits(second))
        ),
        split=(
            {},
            *({one.name: one.proposals[-1]} for one in parted),
            *each(with_parts),
            *(
                {one.name: one.proposals[-1], **second}
                for one in parted
                for second in each(with_parts)
                if suit({one.name: True}, second)
            ),
        ),
    )


def each(tricks: Iterable[Relief]) -> list[Patch]:
    """Return every proposal of some tricks."""
    return [{one.name: value} for one in tricks for value in one.proposals]


def suit(first: Patch, second: Patch) -> bool:
    """Return whether the tricks of two patches may be combined."""
    known = {one.name: one for one in reliefs("activations", "optimizer")}
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
    """Return what changes the mode, also over a file that names a dtype or a loss scale for its own."""
    given, default = (one.to_data()["precision"] for one in (config, change_precision(config, config.precision.mode)))
    patch: Patch = {"mode": mode}
    if given != default:
        new = change_precision(config, mode).to_data()["precision"]
        patch.update({name: new[name] for name in ("dtype", "loss_scale") if name in new})
    return patch


def patched(config: Config, patch: Mapping[str, Any], allow: Sequence[str]) -> Config:
    """Return the configuration as it is with a patch laid over its file. Raises ConfigError where it is refused."""
    if "precision" in patch:
        config = change_precision(config, patch["precision"]["mode"])
    overrides = [write_override(f"memory.{name}", value) for name, value in patch.get("memory", {}).items()]
    return load_config(config.to_data(), overrides, allow=allow)


def parted(config: Config, parts: int) -> Patch:
    """Return the trick that splits the batch into so many micro-batches."""
    return {splitter(): -(-config.train.batch_size // parts)}


def is_same_but_for_size(one: Patch, other: Patch) -> bool:
    """Return whether two patches differ in the micro-batch's size alone."""
    return joined(one, {splitter(): 0}) == joined(other, {splitter(): 0})


def joined(patch: Mapping[str, Any], tricks: Mapping[str, Any]) -> Patch:
    """Return a patch with more memory tricks in it."""
    return {**patch, "memory": {**patch.get("memory", {}), **tricks}} if tricks else dict(patch)
