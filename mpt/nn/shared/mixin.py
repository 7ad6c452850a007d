"""Changing the behaviour of one object by putting a class in front of its own.

The object's class is swapped for a subclass instead of replacing its methods on the instance: a deep copy (an EMA twin)
then owns its behaviour instead of calling into the original, and state-dict keys stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MappingProxyType
from typing import Any, ClassVar

from torch import nn


class Mixin:
    """A class to be put in front of another, whose methods it calls with `super()`."""

    is_outermost: ClassVar[bool] = False
    """Whether it belongs in front of memory tricks' mixins: a precision mode's casts, for one."""


def become(thing: Any, kind: type) -> None:
    """Change an object's class: the one place that does it."""
    thing.__class__ = kind


def mix_in(
    thing: Any, mixin: type[Mixin], methods: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Put a mixin in front of an object's class, with methods that it makes for this class alone."""
    original = type(thing)
    members = {"__module__": original.__module__, **methods}
    become(thing, type(original.__name__, (mixin, original), members))


def own_class(thing: Any) -> type[Any]:
    """Return an object's class without the mixins in front of it."""
    kind: type[Any] = type(thing)
    while len(kind.__bases__) == 2 and issubclass(kind.__bases__[0], Mixin):
        kind = kind.__bases__[1]
    return kind


def exchange_own_class(thing: Any, kind: type) -> None:
    """Change an object's class behind the mixins in front of it."""
    mixed = type(thing)
    if len(mixed.__bases__) != 2 or not issubclass(mixed.__bases__[0], Mixin):
        become(thing, kind)
        return
    own = {name: value for name, value in vars(mixed).items() if isinstance(value, FunctionType)}
    become(thing, mixed.__bases__[1])
    exchange_own_class(thing, kind)
    mix_in(thing, mixed.__bases__[0], own)


@contextlib.contextmanager
def without_outermost(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Take the outermost mixins off inside the block, and put them back in front of the new ones.

    A mixin added inside the block ends in the place that it would have if it had come first.
    """
    layers: list[tuple[nn.Module, type[Mixin], dict[str, Any]]] = []
    for module in modules:
        while (mixin := _outermost(module)) is not None:
            own = {
                name: value
                for name, value in vars(type(module)).items()
                if isinstance(value, FunctionType)
            }
            layers.append((module, mixin, own))
            become(module, type(module).__bases__[1])
    try:
        yield
    finally:
        for module, mixin, own in reversed(layers):
            mix_in(module, mixin, own)


def _outermost(module: nn.Module) -> type[Mixin] | None:
    bases = type(module).__bases__
    is_mixed = len(bases) == 2 and issubclass(bases[0], Mixin) and bases[0].is_outermost
    return bases[0] if is_mixed else None
