"""The units of a network that may be recomputed or counted on their own, found by its structure.

A plain `nn.Sequential` is cut into units: each composite child is one, and loose layers are grouped from one weighted
layer to the next (convolution, BatchNorm, activation). Elsewhere units are the composite members of a `ModuleList`, and
modules whose class occurs more than once in the network. The outermost units win; nothing is looked for inside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from mpt.nn.shared.hidden_channels import is_plain_sequential
from mpt.nn.shared.mixin import own_class

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Unit:
    """A module, or children `start` to `stop` of a plain Sequential if `stop` is given."""

    name: str
    owner: nn.Module
    start: int = 0
    stop: int | None = None

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that run one after the other in this unit."""
        if self.stop is None:
            return [self.owner]
        return [child for child in self.owner._modules.values() if child is not None][
            self.start : self.stop
        ]


Chain = list[Unit]
"""Units that run in this order. Neighbours in one plain Sequential may be joined; others have foreign code between."""


def find_chains(network: nn.Module, name: str) -> list[Chain]:
    """Return the chains of units in a network, in the order of its definition."""
    counts = Counter(
        own_class(m)
        for m in network.modules()
        if _is_composite(m) and not isinstance(m, CONTAINERS)
    )
    repeated = {kind for kind, count in counts.items() if count > 1}
    return list(_walk(network, name, repeated))


def _walk(module: nn.Module, name: str, repeated: set[type[nn.Module]]) -> Iterator[Chain]:
    if is_plain_sequential(module):
        units = _cut(module, name)
        if len(units) > 1:
            yield units
            return
    named = [(f"{name}.{key}", child) for key, child in module.named_children()]
    if isinstance(module, nn.ModuleList) and sum(_is_unit(child) for _, child in named) > 1:
        yield [Unit(key, child) for key, child in named if _is_unit(child)]
        return
    pending: Chain = []
    for key, child in named:
        if own_class(child) in repeated:
            pending.append(Unit(key, child))
            continue
        inner = list(_walk(child, key, repeated))
        if inner and pending:
            yield pending
            pending = []
        yield from inner
    if pending:
        yield pending


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_unit(module: nn.Module) -> bool:
    return _is_composite(module) and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _starts_unit(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return _is_composite(module) or (weight is not None and weight.dim() > 1)


def _cut(sequential: nn.Module, name: str) -> list[Unit]:
    children = list(sequential._modules.items())
    starts = [
        i for i, (_, child) in enumerate(children) if child is not None and _starts_unit(child)
    ]
    # Loose layers before the first weighted one (a Flatten) belong to the first unit.
    starts = [0, *starts[1:]] if starts else [0]
    stops = [*starts[1:], len(children)]
    return [
        Unit(f"{name}.{children[start][0]}", sequential, start, stop)
        for start, stop in zip(starts, stops)
        if children
    ]
