"""What a part's `build` must return, checked where it is called: one line that names the part, not a failure later.

Parts come from outside too, and a forgotten `return` would else end in an AttributeError deep inside of mpt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from mpt.errors import ConfigError, PartError
from mpt.seams import Loss, Phase, Task

Made = TypeVar("Made")


class Networks(dict[str, nn.Module]):
    """A model's networks by name. ConfigError for one that the task asks for and the model does not have."""

    def __init__(self, model: str, task: str, networks: Mapping[str, nn.Module]) -> None:
        super().__init__(networks)
        self.model = model
        self.task = task

    def __missing__(self, name: str) -> nn.Module:
        raise ConfigError(
            f"model {self.model}: task {self.task} wants a network called {name!r}; the model's build returned "
            f"{', '.join(map(repr, self)) or 'none'}"
        )


def require(what: str, made: Any, kind: type[Made]) -> Made:
    """Return what a part made if it is of that kind; PartError otherwise. `what` names the part and its function."""
    if isinstance(made, kind):
        return made
    expected = f"{kind.__module__}.{kind.__qualname__}" if kind.__module__.startswith("mpt") else kind.__qualname__
    raise PartError(f"{what} returned {article(made)}; expected an object of {expected}")


def check_figures(task: Task, made: Any) -> dict[str, float]:
    """Return what a task's `conclude` made as numbers; PartError where it is none, or lacks the task's metric.

    A tensor with one element is a number; anything else a task may add to what it says of an evaluation as `details`.
    """
    what = f"task {type(task).__name__}: its conclude"
    if not isinstance(made, Mapping):
        raise PartError(f"{what} returned {article(made)}; expected a dict of figures, as in {{{task.metric!r}: 0.9}}")
    figures = {}
    for name, figure in made.items():
        try:
            figures[str(name)] = float(figure)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PartError(f"{what} returned {article(figure)} as {name!r}; expected a number") from error
    if task.metric not in figures:
        known = ", ".join(figures) or "none"
        raise PartError(f"{what} returned the figures {known}; {task.metric!r}, the task's metric, is missing")
    return figures


def check_networks(model: str, made: Any) -> dict[str, nn.Module]:
    """Return a model's networks by name; PartError for anything else, ConfigError for layers without sizes."""
    if not isinstance(made, Mapping) or not all(isinstance(one, nn.Module) for one in made.values()):
        found = article(made)
        if isinstance(made, Mapping):
            name, one = next((name, one) for name, one in made.items() if not isinstance(one, nn.Module))
            found = f"a dict whose {name!r} is {article(one)}"
        raise PartError(
            f"model {model}: its build returned {found}; expected a dict of networks by name, as in "
            "{'net': nn.Sequential(...)}"
        )
    networks = dict(made)
    refuse_lazy(model, networks)
    return networks


def check_loss(loss: Loss, phase: Phase) -> None:
    """Raise ConfigError for a loss whose backward must fail. Asked only when it did: a step has no time for it."""
    value: Any = loss.value
    if not isinstance(value, Tensor):
        found = f"a {type(value).__name__}; do not call .item() on it"
    elif value.numel() != 1:
        found = f"a tensor of shape {tuple(value.shape)}; take its mean"
    elif not value.requires_grad:
        found = "a tensor that depends on no trained weight: it was detached, or its weights are frozen"
    else:
        return
    raise ConfigError(f"loss {loss.name!r} of phase {phase.name}: expected a tensor with one number, found {found}")


def article(made: Any) -> str:
    """Return what an object is, in words."""
    name = type(made).__name__
    return "nothing" if made is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def refuse_lazy(model: str, networks: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError for layers that take their sizes from their first input: they have no weights to plan yet."""
    for name, network in networks.items():
        for where, module in network.named_modules(prefix=name):
            if any(isinstance(weight, UninitializedParameter) for weight in module.parameters(recurse=False)):
                raise ConfigError(
                    f"model {model}: {where} is a {type(module).__name__}, whose size is not known before its first "
                    "input; give the layer its size, or call the network once in build()"
                )
