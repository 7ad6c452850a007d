"""Networks and optimizers that somebody's script makes, noted as they are made."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

from torch import nn
from torch.jit import ScriptModule
from torch.optim import Optimizer

from mpt.planner.own.text.places import Standing, stack

T = TypeVar("T")


@dataclass
class Created:
    """Networks and optimizers that were made while a factory ran, and are still there: a script may drop some."""

    made: dict[type[Any], list[weakref.ref[Any]]] = field(
        default_factory=lambda: {nn.Module: [], Optimizer: []}
    )

    stacks: dict[int, tuple[Standing, ...]] = field(default_factory=dict)
    """id(optimizer) -> where the functions stood that made it."""

    @property
    def modules(self) -> list[nn.Module]:
        """The networks and their parts, without those that torch's compiler of scripts has made of some."""
        return [one for one in self._alive(nn.Module) if not isinstance(one, ScriptModule)]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers."""
        return self._alive(Optimizer)

    def _alive(self, kind: type[T]) -> list[T]:
        alive = [one for made in self.made[kind] if (one := made()) is not None]
        return [*{id(one): one for one in alive}.values()]  # one that loads its state is made again


@contextmanager
def noting_what_is_made(created: Created | None = None) -> Iterator[Created]:
    """Note every network and optimizer that is made inside the block, be it as a copy, and to those of
    earlier blocks."""
    created = created or Created()
    with ExitStack() as stack:
        for kind in created.made:
            for name in ("__init__", "__setstate__"):
                stack.enter_context(_noting(kind, name, created))
        yield created


@contextmanager
def _noting(kind: type[Any], name: str, created: Created) -> Iterator[None]:
    original = getattr(kind, name)

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        created.made[kind].append(weakref.ref(self))
        # one that loads its state was made elsewhere
        if kind is Optimizer and (name == "__init__" or id(self) not in created.stacks):
            created.stacks[id(self)] = stack()

    with mock.patch.object(kind, name, start):
        yield
