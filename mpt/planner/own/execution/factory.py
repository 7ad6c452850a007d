"""The function that makes a training step outside of mpt: its place, and the values that it may return.

A factory builds everything and returns the step, in one of two forms:

    return step                              # called as step()
    return model, optimizer, batch, step     # called as step(model, optimizer, batch), step(batch) or step()

It is named as `package.module:function` or `path/to/file.py:function`, since the plan is made in another process, which
imports it there. The block below `if __name__ == "__main__":` is left out then. A file without a function is a script,
which is executed as it stands and stopped between its steps (`mpt.planner.own.execution.script`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import torch

from mpt import vision_ops  # noqa: F401 - before a torchvision that may be built for another torch
from mpt.config.finding.registry import place
from mpt.errors import ConfigError, MptError
from mpt.planner.own.execution.script import beginning_of
from mpt.planner.own.execution.source import Made, Source
from mpt.planner.own.text.names import named_networks
from mpt.planner.own.text.places import standing

FORMS = "a step, which takes nothing, or (model, optimizer, batch, step)"


MADE_BY_TORCH = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
_wants_plan: set[Source] = set()
"""Scripts that set a default device."""


@functools.cache
def find_factory(source: Source) -> Callable[..., Any]:
    """Import a factory, once in a process. Raises ConfigError if there is none or its file cannot be imported."""
    try:
        function = _import_factory(source)
    except MptError:
        raise
    except (Exception, SystemExit) as error:
        ends = (
            "it ends the program"
            if isinstance(error, SystemExit)
            else f"{type(error).__name__}: {error}"
        )
        raise ConfigError(
            f"{place(error, Path(source.where))}: it cannot be imported: {ends}"
        ) from error
    if not callable(function):
        raise ConfigError(f"{source}: {source.where} has no function {source.function}")
    found: Callable[..., Any] = function
    return found


def import_in_plan(source: Source, factory: Callable[..., Any]) -> Callable[..., Any]:
    """Execute a factory's file again if that makes tensors: those of a plan are its own."""
    module = sys.modules.get(Path(source.where).stem) if source.is_file else None
    values = () if module is None else list(vars(module).values())
    if source in _wants_plan or any(isinstance(one, MADE_BY_TORCH) for one in values):
        again: Callable[..., Any] = _import_factory(source)
        return again
    return factory


def _import_factory(source: Source) -> Any:
    """Execute the file of a factory, which may lack it. A script is its own, and is executed when that is called."""
    if source.is_script:
        return beginning_of(source)
    if source.folder not in sys.path:
        sys.path.insert(0, source.folder)
    with _called_alone(source):
        module = (
            _import_file(Path(source.where)) if source.is_file else _import_module(source.where)
        )
    return getattr(module, source.function, None)


@contextmanager
def _called_alone(source: Source) -> Iterator[None]:
    """Let a script that reads its command line find none of another program inside the block."""
    with mock.patch.object(sys, "argv", [source.where]):
        yield


def reset_default_device(source: Source) -> None:
    """Take back `torch.set_default_device`, which a script is to call in its plan."""
    if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not None:
        torch.set_default_device(None)
        _wants_plan.add(source)


def _import_module(name: str) -> ModuleType:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise ConfigError(f"{name}: no module of that name is installed or in this folder")
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def batch_size_of(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> int | None:
    """Return the batch size that a factory is called with, its default included; None if it takes none."""
    parameter = inspect.signature(factory).parameters.get("batch_size")
    value = arguments.get("batch_size", None if parameter is None else parameter.default)
    return value if type(value) is int and value > 0 else None


def call_factory(source: Source, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Made:
    """Build a step. Raises ConfigError for arguments that the factory does not take, and for another result."""
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        takes = ", ".join(inspect.signature(factory).parameters) or "nothing"
        raise ConfigError(f"{source}: {error}; it takes {takes}") from None
    with _called_alone(source), seen_at_return(factory) as seen:
        made = factory(**arguments)
    return read_made(source, made, seen)


@contextmanager
def seen_at_return(function: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Fill a mapping with the variables of a function that are still there, and where it stands, as it returns inside
    the block.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    found: dict[str, Any] = {}

    def on_line(frame: FrameType, event: str, value: Any) -> Any:
        if event == "return":
            values = ((name, _held_weakly(one)) for name, one in frame.f_locals.items())
            found.update(variables=dict(values), place=standing(frame))
        return on_line

    def on_call(frame: FrameType, event: str, value: Any) -> Any:
        return on_line if frame.f_code is code else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield found
    finally:
        sys.settrace(before)


def _held_weakly(value: Any) -> Callable[[], Any]:
    """Return a reference that does not keep a value; one to nothing if there is none to its kind."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None


def read_made(source: Source, made: Any, seen: Mapping[str, Any] | None = None) -> Made:
    """Bring a factory's result into one form; `seen`: what `seen_at_return` found."""
    if isinstance(made, Made):
        return made
    held = seen["variables"] if seen else {}
    variables = {name: one for name, find in held.items() if (one := find()) is not None}
    places = dict.fromkeys(held, seen["place"]) if seen else {}

    def named(values: Mapping[str, Any]) -> dict[str, Any]:
        known = {id(one) for one in (*variables.values(), *named_networks(variables).values())}
        others = {key: one for key, one in values.items() if id(one) not in known}
        return {**others, **variables}

    if callable(made):
        return Made(made, named(seen_by(made)), variables=variables, places=places)
    if not (isinstance(made, tuple) and len(made) == 4 and callable(made[3])):
        found = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
        raise ConfigError(f"{source}: it returned {found}; return {FORMS}")
    model, optimizer, batch, step = made
    models = dict(model) if isinstance(model, Mapping) else {"model": model}
    one_step = _without_arguments(source, step, model, optimizer, batch)
    return Made(one_step, named(models), batch, variables=variables, places=places)


def seen_by(step: Any) -> Mapping[str, Any]:
    """Return the variables that a function sees, or the attributes of a method's object, by name."""
    if inspect.ismethod(step):
        return dict(getattr(step.__self__, "__dict__", {}))
    if not inspect.isfunction(step):
        return {}
    seen = inspect.getclosurevars(step)
    return {**seen.nonlocals, **seen.globals}


def _without_arguments(
    source: Source, step: Callable[..., Any], model: Any, optimizer: Any, batch: Any
) -> Callable[[], Any]:
    forms = ((model, optimizer, batch), (batch,), ())
    for given in forms:
        try:
            inspect.signature(step).bind(*given)
        except TypeError:
            continue
        return lambda: step(*given)
    raise ConfigError(
        f"{source}: its step takes neither (model, optimizer, batch) nor (batch) nor nothing"
    )
