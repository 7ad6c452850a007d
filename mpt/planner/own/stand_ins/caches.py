"""What modules and classes keep of a plan's tensors, forgotten at its end: tables that are filled at their first use.

A tensor that a library caches in one plan would be found there by the next, which then lacks its memory, and has a
tensor of modes that are gone.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

from torch._subclasses.fake_tensor import FakeTensor

OWN = ("torch", "mpt", "sympy")
"""Packages whose caches are no script's business."""


@contextmanager
def caches_forgotten() -> Iterator[None]:
    """Put global names back at the end of the block that hold fake tensors since, and empty caches of such ones."""
    before = {name: dict(vars(module)) for name, module in modules()}
    try:
        with resolvers_replaced():
            yield
    finally:
        for name, module in modules():
            forget_in(module, before.get(name))
        forget_accelerator()


@contextmanager
def resolvers_replaced() -> Iterator[None]:
    """Let a script register its resolvers of OmegaConf inside the block though they are known since an earlier plan."""
    config: Any = getattr(sys.modules.get("omegaconf"), "OmegaConf", None)
    if config is None:
        yield
        return
    original = config.register_new_resolver

    def register(name: str, resolver: Any, **options: Any) -> None:
        original(name, resolver, **{**options, "replace": True})

    with mock.patch.object(config, "register_new_resolver", register):
        yield


def forget_accelerator() -> None:
    """Let Accelerate start anew: a process has one precision for all scripts."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def modules() -> Iterator[tuple[str, ModuleType]]:
    """Yield the imported modules of scripts and libraries."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] not in OWN:
            yield name, module


def forget_in(module: ModuleType, before: Mapping[str, Any] | None) -> None:
    """Forget fake tensors among a module's global names, in its dictionaries, caches and classes."""
    names = vars(module)
    for name, value in list(names.items()):
        if issubclass(type(value), FakeTensor):
            if before is None:  # imported since: its names were made so
                continue
            if name in before:
                names[name] = before[name]
            else:
                del names[name]
        elif issubclass(type(value), type):
            if value.__module__ == module.__name__:
                for one in list(vars(value).values()):
                    forget_cached(one)
        else:
            forget_cached(value)


def forget_cached(value: Any) -> None:
    """Forget the fake tensors of a dictionary, of a function's cache, or of those that a decorated function sees.

    Other kinds of dictionaries may import what they are asked for.
    """
    function = value.__func__ if type(value) in (staticmethod, classmethod) else value
    if type(function) is FunctionType:
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # a name that has no value
                if type(cell.cell_contents) in (dict, functools._lru_cache_wrapper):
                    forget_cached(cell.cell_contents)
    elif type(value) is dict:
        for key in [key for key, one in value.items() if is_fake(one)]:
            del value[key]
    elif type(value) is functools._lru_cache_wrapper and value.cache_info().currsize:
        # the results, or a table of them if their number is not limited
        held = gc.get_referents(value)
        tables = [one for table in held if type(table) is dict for one in table.values()]
        if any(map(is_fake, [*held, *tables])):
            value.cache_clear()


def is_fake(value: Any) -> bool:
    """Return whether this is a fake tensor, or a list or tuple with one."""
    kind = type(value)
    return issubclass(kind, FakeTensor) or (
        kind in (list, tuple) and any(issubclass(type(one), FakeTensor) for one in value)
    )
