"""Optimizers that step without torch's compiler, whose import takes nearly as long as that of torch itself.

torch.optim imports `torch._dynamo` when the first optimizer is made, and at each step, to tell the compiler what to
leave out of its graphs; a dispatch mode does at its first operation. A process that compiles nothing has no use for
that: here the same methods are called without the wrappers, so the numbers are the same. Found in torch 2.13
(`torch/_compile.py`, and `_use_grad_for_differentiable` in `torch/optim/optimizer.py`); where another torch does it in
another way, nothing is changed but the time that a start takes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from mpt.config.schema import Config
from mpt.run.memory_meter import DispatchWatch

STEP_WRAPPER, METHOD_WRAPPER_FILE = "_use_grad", "_compile.py"
CACHE = "__dynamo_disable"
"""Where torch's wrapper of a method keeps what it calls, once it has asked the compiler for it."""


def leave_out_compiler(config: Config) -> None:
    """Let this process train without importing torch's compiler, unless the configuration compiles."""
    if "compile" in config.memory.tricks or "torch._dynamo" in sys.modules:
        return
    for method in (*vars(Optimizer).values(), DispatchWatch.__torch_dispatch__):
        code, inner = getattr(method, "__code__", None), getattr(method, "__wrapped__", None)
        if code is not None and inner is not None and code.co_filename.endswith(METHOD_WRAPPER_FILE):
            setattr(inner, CACHE, inner)
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) and issubclass(kind, Optimizer) else None
        code, inner = getattr(step, "__code__", None), getattr(step, "__wrapped__", None)
        if code is not None and inner is not None and code.co_name == STEP_WRAPPER:
            kind.step = uncompiled(inner)


def uncompiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's step within the gradient mode that torch's wrapper enters."""

    @functools.wraps(step)
    def stepped(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step(optimizer, *arguments, **options)

    return stepped
