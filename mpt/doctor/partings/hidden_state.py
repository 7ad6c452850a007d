"""State that a training's objects hold and no checkpoint does: attributes of networks, the task, the data set and
optimizers.

A checkpoint has parameters, buffers, the results of `state_dict` and torch's, numpy's and Python's generators. Plain
values, tensors and generators in other attributes are collected here by a dotted name, to compare two trainings by
them and to carry one over.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpt.config.finding.part_packages import IMPORT_HOME
from mpt.doctor.partings.lockstep import Training
from mpt.nn.shared.named_modules import named_modules

MODULE_FIELDS = frozenset(vars(nn.Module()))
OPTIMIZER_FIELDS = frozenset({"state", "param_groups", "defaults"})
PLAIN = (type(None), bool, int, float, complex, str, bytes)
LIBRARIES = ("torch", "builtins", "mpt.")
DEEPEST = 4
"""Objects inside objects that are looked into."""
LONGEST = 40
"""Characters of a value that are shown."""


@dataclass(frozen=True)
class Hidden:
    """One attribute: whose it is, its name there and its value."""

    owner: Any
    name: str
    value: Any

    def show(self) -> str:
        """Return the value for a message."""
        plain = isinstance(self.value, PLAIN)
        text = repr(self.value) if plain else f"a {type(self.value).__name__}"
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."

    def freeze(self) -> Any:
        """Return a copy of the value."""
        return copy.deepcopy(self.value)

    def put(self, frozen: Any) -> None:
        """Give the attribute a value that `freeze` made."""
        if isinstance(self.value, torch.Generator):
            self.value.set_state(frozen.get_state())
        else:
            setattr(self.owner, self.name, copy.deepcopy(frozen))


def token(value: Any) -> str:
    """Return a text that is the same for equal values."""
    return repr([comparable(leaf) for leaf in tree_leaves(value)])


def comparable(value: Any) -> Any:
    """Return the value of two equal leaves."""
    if isinstance(value, torch.Generator):
        return comparable(value.get_state())
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), hashlib.sha256(content).hexdigest()
    if isinstance(value, numpy.ndarray):
        return str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    return value


LEAVES = (*PLAIN, Tensor, numpy.ndarray, torch.Generator, random.Random, numpy.random.Generator)


def is_value(value: Any) -> bool:
    """Return whether something is plain: numbers, text, tensors and generators, or containers of them."""
    if isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and value.requires_grad):
        return False
    return all(
        isinstance(leaf, LEAVES) and not isinstance(leaf, nn.Parameter)
        for leaf in tree_leaves(value)
    )


def hidden_state(training: Training) -> dict[str, Hidden]:
    """Return values outside every state, by dotted name. Their owners' own names are among them, with no value."""
    run, seen = training.run, set[int]()
    found: dict[str, Hidden] = {}
    for name, module in named_modules(run.task.modules):
        found |= dict(of_module(name, module))
        seen.add(id(module))
    for name, optimizer in run.optimizers.items():
        fields = {
            key: value for key, value in fields_of(optimizer).items() if key not in OPTIMIZER_FIELDS
        }
        found[f"optimizer of {name}"] = Hidden(optimizer, "", None)
        found |= {
            f"optimizer of {name}.{key}": Hidden(optimizer, key, value)
            for key, value in own_values(fields)
        }
        seen.add(id(optimizer))
    found |= dict(of_object("task", run.task, seen, DEEPEST))
    found |= dict(of_object("data set", training.data, seen, DEEPEST))
    return found


def is_own_class(kind: type) -> bool:
    """Return whether a class is the user's: those of torch and mpt hold constants."""
    return kind.__module__.startswith(IMPORT_HOME) or not kind.__module__.startswith(LIBRARIES)


def fields_of(thing: Any) -> dict[str, Any]:
    """Return an object's attributes, with the plain ones of its class that it has not been given its own of."""
    classes = [one for one in reversed(type(thing).__mro__) if is_own_class(one)]
    fields = {
        name: value for one in classes for name, value in vars(one).items() if type(value) in PLAIN
    }
    fields = {name: value for name, value in fields.items() if not name.startswith("__")}
    with contextlib.suppress(TypeError):  # an object with slots
        fields |= vars(thing)
    return fields


def of_module(path: str, module: nn.Module) -> Iterator[tuple[str, Hidden]]:
    """Yield a module's own attributes, and the buffers that its state leaves out."""
    fields = {name: value for name, value in fields_of(module).items() if name not in MODULE_FIELDS}
    yield path, Hidden(module, "", None)
    for name, value in own_values(fields):
        yield f"{path}.{name}", Hidden(module, name, value)
    for name in module._non_persistent_buffers_set:
        if module._buffers.get(name) is not None:
            yield f"{path}.{name}", Hidden(module, name, module._buffers[name])


def own_values(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the plain values among an object's fields, but for hooks of torch."""
    for name, value in fields.items():
        if "hook" not in name and not name.startswith("_optimizer_") and is_value(value):
            yield name, value


def of_object(path: str, thing: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Hidden]]:
    """Yield an object's plain attributes, and those of the objects that it holds."""
    if id(thing) in seen or not depth:
        return
    seen.add(id(thing))
    yield path, Hidden(thing, "", None)
    for name, value in fields_of(thing).items():
        if is_value(value):
            yield f"{path}.{name}", Hidden(thing, name, value)
        elif not isinstance(value, nn.Module | torch.optim.Optimizer | type) and not callable(
            value
        ):
            yield from of_object(f"{path}.{name}", value, seen, depth - 1)
