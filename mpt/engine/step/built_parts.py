"""Types that a part's `build` must return, checked at the call: one line that names the part, not a failure later.

Parts come from outside too, and a forgotten `return` would else end in an AttributeError deep inside of mpt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from mpt.errors import ConfigError, PartError
from mpt.seams import Evidence, Loss, Phase, Precision, Task
from mpt.seams.members import article, check_members
from mpt.seams.task_members import are_networks

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
    """Return a part's result if it is of that kind; PartError otherwise. `what` names the part and its function."""
    if isinstance(made, kind):
        check_members(what, made, kind)
        return made
    expected = (
        f"mpt.seams.{kind.__qualname__}"
        if kind.__module__.startswith("mpt.seams")
        else kind.__qualname__
    )
    raise PartError(f"{what} returned {article(made)}; expected an object of {expected}")


def check_figures(task: Task, made: Any) -> dict[str, float]:
    """Return the results of a task's `conclude` as numbers; PartError if it is none, or lacks the task's metric.

    A tensor with one element is a number; anything else a task may add to an evaluation goes into its `details`.
    """
    what = f"task {type(task).__name__}: its conclude"
    if not isinstance(made, Mapping):
        raise PartError(
            f"{what} returned {article(made)}; expected a dict of figures, as in {{{task.metric!r}: 0.9}}"
        )
    figures = {}
    for name, figure in made.items():
        try:
            figures[str(name)] = float(figure)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PartError(
                f"{what} returned {article(figure)} as {name!r}; expected a number"
            ) from error
    if task.metric not in figures:
        known = ", ".join(figures) or "none"
        raise PartError(
            f"{what} returned the figures {known}; {task.metric!r}, the task's metric, is missing"
        )
    return figures


def check_networks(model: str, made: Any) -> dict[str, nn.Module]:
    """Return a model's networks by name; PartError for anything else, ConfigError for layers without sizes."""
    if not are_networks(made):
        found = article(made)
        if isinstance(made, Mapping):
            name, one = next(
                (name, one) for name, one in made.items() if not isinstance(one, nn.Module)
            )
            found = f"a dict whose {name!r} is {article(one)}"
        raise PartError(
            f"model {model}: its build returned {found}; expected a dict of networks by name, as in "
            "{'net': nn.Sequential(...)}"
        )
    networks = dict(made)
    refuse_lazy(model, networks)
    return networks


def check_forward(precision: Precision) -> None:
    """Raise PartError for a precision mode whose `forward` returns no context to compute a forward in."""
    made: Any = precision.forward()
    if not isinstance(made, AbstractContextManager):
        raise PartError(
            f"precision {precision.name}: its forward returned {article(made)}; expected a context, as "
            "contextlib.nullcontext()"
        )


def check_phases(task: str, made: Any) -> list[Phase]:
    """Return a task's phases; PartError for anything else, and for none, with which nothing would be trained."""
    phases = list(made) if isinstance(made, Iterable) else []
    wrong = [one for one in phases if not isinstance(one, Phase)]
    if phases and not wrong:
        return phases
    found = "no phase" if isinstance(made, Iterable) else article(made)
    if wrong:
        found = f"{article(wrong[0])} among them"
    raise PartError(f"task {task}: its phases returned {found}; expected a list of mpt.seams.Phase")


def check_evidence(task: Task, made: Any, hook: str) -> Evidence:
    """Return a task's outputs for an evaluation; PartError for anything but tensors by name, a row per sample."""
    what = f"task {type(task).__name__}: its {hook}"
    if not isinstance(made, Mapping):
        raise PartError(f"{what} returned {article(made)}; expected a dict of tensors by name")
    for name, value in made.items():
        if not isinstance(value, Tensor):
            raise PartError(f"{what} returned {article(value)} as {name!r}; expected a tensor")
        if value.dim() == 0:
            raise PartError(
                f"{what} returned a single number as {name!r}; expected a tensor with a row per sample"
            )
    return dict(made)


def check_losses(together: Sequence[Loss], phase: Phase) -> None:
    """Raise ConfigError for losses whose backward must fail. Asked only when it did: a step has no time for it."""
    trains = any(isinstance(loss.value, Tensor) and loss.value.requires_grad for loss in together)
    for loss in together:
        value: Any = loss.value
        if not isinstance(value, Tensor):
            found = f"a {type(value).__name__}; do not call .item() on it"
        elif value.numel() != 1:
            found = f"a tensor of shape {tuple(value.shape)}; take its mean"
        elif not value.is_floating_point() and trains:
            found = f"one of {str(value.dtype).removeprefix('torch.')}, which has no order; take a real part or a size"
        elif not trains:
            found = "a tensor that depends on no trained weight: it was detached, or its weights are frozen"
        else:
            continue
        raise ConfigError(
            f"loss {loss.name!r} of phase {phase.name}: expected a tensor with one number, found {found}"
        )


RELEASED = ("backward through the graph a second time", "already been freed", "already unpacked")
"""Autograd's words, and those of its checkpoints, for a graph that an earlier backward has released."""


def check_graph(
    error: Exception, together: Sequence[Loss], done: Sequence[str], phase: Phase
) -> None:
    """Raise ConfigError if a backward failed because an earlier one had released its graph.

    `done` are the names of the losses of this micro-batch that were back-propagated before.
    """
    if any(words in str(error) for words in RELEASED):
        raise ConfigError(shared_graph([loss.name for loss in together], done, phase)) from error


def shared_graph(names: Sequence[str], done: Sequence[str], phase: Phase) -> str:
    """Return the message for losses whose graph an earlier backward has released."""
    own = ", ".join(map(repr, names))
    if not done:
        return (
            f"phase {phase.name}: the loss {own} reaches into the graph of an earlier update, which is gone; detach "
            "what is kept from one batch to the next"
        )
    return (
        f"phase {phase.name}: the loss {own} shares a forward with {', '.join(map(repr, done))}, whose backward has "
        "released it; return them together, as a tuple: yield Loss(...), Loss(...)"
    )


def refuse_lazy(model: str, networks: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError for layers that take their sizes from their first input: they have no weights to plan yet."""
    for name, network in networks.items():
        for where, module in network.named_modules(prefix=name):
            if any(
                isinstance(weight, UninitializedParameter)
                for weight in module.parameters(recurse=False)
            ):
                raise ConfigError(
                    f"model {model}: {where} is a {type(module).__name__}, whose size is not known before its first "
                    "input; give the layer its size, or call the network once in build()"
                )
