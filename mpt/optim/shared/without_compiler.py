"""Optimizers that step without torch's compiler, whose import takes nearly as long as that of torch itself.

torch.optim imports `torch._dynamo` when the first optimizer is made, and at each step, to tell the compiler which calls
to leave out of its graphs; a dispatch mode does at its first operation. A process that compiles nothing has no use for
that: here the same methods are called without the wrappers, so the numbers are the same. Once something has imported
the compiler, all is as torch has it. Found in torch 2.13 (`torch/_compile.py`, and `_use_grad_for_differentiable` in
`torch/optim/optimizer.py`); if another torch does it in another way, nothing is changed but the time of a start.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from mpt.run.process.memory_meter import DispatchWatch

COMPILER = "torch._dynamo"
STEP_WRAPPER, METHOD_WRAPPER_FILE = "_use_grad", "_compile.py"
CACHE = "__dynamo_disable"
"""The attribute in which torch's wrapper of a method keeps its function, once it has asked the compiler for it."""


def leave_out_compiler() -> None:
    """Let this process train without importing torch's compiler until something else does."""
    if COMPILER in sys.modules:
        return
    for method in (*vars(Optimizer).values(), DispatchWatch.__torch_dispatch__):
        inner = wrapped(method)
        if inner is not None and method.__code__.co_filename.endswith(METHOD_WRAPPER_FILE):
            setattr(inner, CACHE, until_compiled(inner))
    for kind in vars(torch.optim).values():
        step = (
            vars(kind).get("step")
            if isinstance(kind, type) and issubclass(kind, Optimizer)
            else None
        )
        inner = wrapped(step)
        if step is not None and inner is not None and step.__code__.co_name == STEP_WRAPPER:
            kind.step = stepping(inner, step)


def wrapped(function: Any) -> Callable[..., Any] | None:
    """Return the function that `functools.wraps` wrapped."""
    return vars(function).get("__wrapped__") if isinstance(function, FunctionType) else None


def until_compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method, and restores torch's wrapper once the compiler is imported."""

    def call(*arguments: Any, **options: Any) -> Any:
        if COMPILER not in sys.modules:
            return method(*arguments, **options)
        import torch._dynamo

        disable: Any = torch._dynamo.disable
        kept_out: Callable[..., Any] = disable(method, True, wrapping=False)
        setattr(method, CACHE, kept_out)
        return kept_out(*arguments, **options)

    return call


def stepping(step: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's step within the gradient mode that torch's wrapper enters."""

    @functools.wraps(step)
    def stepped(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
        if COMPILER in sys.modules:
            return wrapper(optimizer, *arguments, **options)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step(optimizer, *arguments, **options)

    return stepped
