"""Changes, one at a time, when memory runs out: smaller micro-batches, recomputation, offloading.

The effective batch stays. Micro-batches are halved first, down to a floor; then blocks are recomputed and activations
offloaded, which change no gradient; then micro-batches go below the floor. The order is read off a configuration, so
that the same ladder serves a run that adapts (`mpt.engine.recovery.out_of_memory`) and a proposal to the user.

A trick is meant to be applied before precision hangs its casts in front of classes. On a run that is being trained
those are taken off meanwhile, so that the network ends as if it had been built with the trick: same units found, same
order of casts and recomputation, same state-dict keys, same parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import BatchNorm1d, _BatchNorm

from mpt.config.finding.registry import INSTALLED
from mpt.config.options import bare_setting
from mpt.config.schema import Config
from mpt.errors import ConfigError
from mpt.memory.relieving.relief import Relief, reliefs, splitter
from mpt.nn.shared.mixin import become, without_outermost
from mpt.seams import Run

FLOOR = 8
"""Samples per micro-batch below which a GPU idles and BatchNorm's statistics are mostly noise."""

Move = tuple[str, Any]
"""A memory trick's name and the scalar that the configuration would set it to."""


def next_moves(config: Config, whole_ladder: bool, least: int = 1) -> Iterator[Move]:
    """Yield the changes that may be tried from a configuration on, each on top of those before it.

    Without `whole_ladder`, micro-batches alone. Changes that cannot be combined with the configuration are left out.
    """
    size, splits = micro_batch_size(config), splitter()
    sizes: list[int] = []
    while find_conflict(config, splits) is None:
        smaller = smaller_size(sizes[-1] if sizes else size, config.train.batch_size, least)
        if smaller is None:
            break
        sizes.append(smaller)
    if not whole_ladder:
        yield from ((splits, size) for size in sizes)
        return
    yield from ((splits, size) for size in sizes if size >= FLOOR)
    for trick in later_tricks():
        if trick.name not in config.memory.tricks and find_conflict(config, trick.name) is None:
            yield trick.name, trick.ladder
    yield from ((splits, size) for size in sizes if size < FLOOR)


def later_tricks() -> list[Relief]:
    """Return the tricks that can be applied to a run that is being trained."""
    return [one for one in reliefs("activations") if one.ladder is not None]


def pointless(name: str, device: torch.device) -> str | None:
    """Return why a trick relieves nothing on a device, or None."""
    return next(
        (one.pointless_on.get(device.type) for one in reliefs("activations") if one.name == name),
        None,
    )


def micro_batch_size(config: Config) -> int:
    """Return the samples that go through the networks at once."""
    name = splitter()
    settings = config.memory.tricks.get(name)
    if settings is None:
        return config.train.batch_size
    size: int | str = bare_setting(settings)
    return config.train.batch_size if size == "auto" else min(int(size), config.train.batch_size)


def smaller_size(size: int, batch_size: int, least: int) -> int | None:
    """Return about half the size, or None below `least`. If one sample is too few, no last part has only one."""
    for smaller in range(size // 2, least - 1, -1):
        if smaller and (least == 1 or batch_size % smaller != 1):
            return smaller
    return None


def least_size(run: Run) -> int:
    """Return the smallest micro-batch that the networks can be trained on: 1, or 2 with a BatchNorm over samples."""
    modules = [module for root in run.task.trainable.values() for module in root.modules()]
    return 2 if any(isinstance(module, BatchNorm1d) for module in modules) else 1


def has_batch_norm(run: Run) -> bool:
    """Return whether micro-batches change the result."""
    return any(
        isinstance(module, _BatchNorm)
        for root in run.task.trainable.values()
        for module in root.modules()
    )


def find_conflict(config: Config, name: str) -> str | None:
    """Return why a trick cannot be added to a configuration, or None."""
    plugin = INSTALLED.find("memory", name)
    assert plugin is not None
    for other, other_plugin in config.memory.plugins.items():
        reason = plugin.conflicts.get(other) or other_plugin.conflicts.get(name)
        if reason:
            return f"it cannot be combined with {other}: {reason}"
    return None


def with_memory(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a configuration with some tricks set, each by the scalar that YAML would have; `True` is its defaults."""
    tricks, plugins = dict(config.memory.tricks), dict(config.memory.plugins)
    for name, value in changes.items():
        plugin = INSTALLED.find("memory", name)
        assert plugin is not None
        shorthand = plugin.settings_class.shorthand
        given = {} if value is True or shorthand is None else {shorthand: value}
        tricks[name], plugins[name] = plugin.settings_class.model_validate(given), plugin
    return replace(config, memory=replace(config.memory, tricks=tricks, plugins=plugins))


def adapted_config(run: Run) -> Config:
    """Return the configuration that the run has by now."""
    return with_memory(run.config, run.adaptation.changes)


def move(run: Run, name: str, value: Any) -> Callable[[], None]:
    """Change a built run, and return a function that takes the change back. Raises ConfigError if it cannot be done."""
    reason = find_conflict(run.config, name)
    if reason is not None:
        raise ConfigError(reason)
    before, tricks = replace(run.adaptation, changes=dict(run.adaptation.changes)), list(run.tricks)
    classes_before = [
        (module, type(module), getattr(module, "inplace", None)) for module in _all_modules(run)
    ]
    why_not = pointless(name, run.device)
    if why_not is not None:
        raise ConfigError(why_not)
    if name == splitter():
        run.adaptation.micro_batch_size = value
    else:
        add_trick(run, with_memory(run.config, {name: value}), name)
    run.adaptation.changes[name] = value

    def take_back() -> None:
        run.adaptation.changes, run.adaptation.micro_batch_size = (
            before.changes,
            before.micro_batch_size,
        )
        run.tricks[:] = tricks
        for module, kind, inplace in classes_before:
            become(module, kind)
            if inplace is not None:
                module.inplace = inplace

    return take_back


def move_again(run: Run, adapted: Mapping[str, Any]) -> dict[str, Any]:
    """Repeat on a newly built run the changes of an earlier process, and return the changes.

    Only if the run may adapt: a configuration that says `on_oom: stop` is taken at its word. The smaller micro-batch
    wins, and a trick that is configured by now keeps its settings.
    """
    if not run.adaptation.is_allowed:
        return {}
    changed = {}
    for name, value in adapted.items():
        config = adapted_config(run)
        known = (
            micro_batch_size(config) <= value
            if name == splitter()
            else name in config.memory.tricks
        )
        if not known:
            # configured otherwise by now; memory may run out again and be heard
            with contextlib.suppress(ConfigError):
                move(run, name, value)
                changed[name] = value
    return changed


def add_trick(run: Run, config: Config, name: str) -> None:
    """Apply a configured trick to a run that is built already."""
    plugin = config.memory.plugins[name]
    trick = plugin.member("build")(plugin.native_settings(config.memory.tricks[name]))
    with without_outermost(_all_modules(run)):
        trick.apply(run.task, run.precision)
    trick.attach(run)
    run.tricks.append(trick)


def _all_modules(run: Run) -> list[nn.Module]:
    return list(
        dict.fromkeys(module for root in run.task.modules.values() for module in root.modules())
    )
