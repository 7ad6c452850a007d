"""Kernels that a script compiles when it is imported (`torch.utils.cpp_extension.load`).

That takes a compiler of CUDA, and a plan could not call them: they read memory by its address. So nothing is compiled,
and a call of such a kernel is refused by its name. Scripts that choose between such a kernel and torch's operators are
planned where they choose the latter; to see if they would, `load` fails in another attempt, as without a compiler.

Kernels in Triton write to tensors that they are given, and allocate nothing: their calls are counted and do nothing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any, cast
from unittest import mock
from weakref import WeakSet

import torch

from mpt.planner.trace.cannot_plan import CannotPlan, line_of

NAME = "torch.utils.cpp_extension"
TRITON = "triton.runtime.jit"


NO_COMPILER = "there is no compiler of CUDA in a plan"


_made: WeakSet[Extension] = WeakSet()


class KernelNotCompiled(CannotPlan):
    """A step calls a kernel that its script compiles."""


class Extension:
    """In the place of a compiled module, of which any attribute is a kernel."""

    def __init__(self, name: str) -> None:
        self.name = name
        _made.add(self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args: Any, **options: Any) -> Any:
            raise KernelNotCompiled(
                f"cannot plan: {self.name}.{name} is a kernel that the script compiles, of whose memory a plan knows "
                f"nothing: let it call torch's own operators, at {line_of(sys._getframe(1))}"
            )

        return refuse


def extension(name: str, *args: Any, **options: Any) -> Extension:
    """Return an extension that is not compiled, which can be imported by its name from then on.

    One that is no Python module has its kernels in `torch.ops`, mostly by the same name.
    """
    found = Extension(name)
    if options.get("is_python_module") is False:
        vars(torch.ops).setdefault(name, found)
    sys.modules.setdefault(name, cast(ModuleType, found))
    return found


def _not_imported() -> None:
    """Let no extension be importable any more."""
    holders: tuple[dict[str, Any], ...] = (sys.modules, vars(torch.ops))
    for held in holders:
        for name in [name for name, one in held.items() if type(one) is Extension]:
            del held[name]


@contextmanager
def extensions_forgotten() -> Iterator[None]:
    """Let global names that hold extensions be None from here on, unless the block fails: libraries load them once."""
    gc.unfreeze()  # what was frozen for a fork is in no list of referrers
    holders = {id(one): one for kernel in _made for one in gc.get_referrers(kernel)}
    held: list[tuple[dict[str, Any], str, Any]] = [
        (one, name, value)
        for one in holders.values()
        if type(one) is dict and "__spec__" in one
        for name, value in one.items()
        if type(value) is Extension
    ]
    for names, name, _ in held:
        names[name] = None
    try:
        yield
    except BaseException:
        for names, name, value in held:
            names[name] = value
        raise


def without_compiler(*args: Any, **options: Any) -> Any:
    """Fail as where nothing can be compiled."""
    raise RuntimeError(NO_COMPILER)


class TritonKernels:
    """Kernels in Triton that a step calls."""

    called = 0
    """How often it did."""

    def launch(self, *args: Any, **options: Any) -> None:
        """Launch nothing."""
        self.called += 1


@contextmanager
def nothing_compiled(has_compiler: bool = True) -> Iterator[TritonKernels]:
    """Let `load`, `load_inline` and Triton compile nothing inside the block, be they imported before or in it.

    The first two fail if there is no compiler.
    """
    execute = SourceFileLoader.exec_module
    load = extension if has_compiler else without_compiler
    kernels = TritonKernels()
    with ExitStack() as stack:
        stack.callback(_not_imported)

        def replace(module: ModuleType) -> None:
            if module.__name__ == NAME:
                extensions = mock.patch.multiple(module, load=load, load_inline=load)
                stack.enter_context(extensions)
                return
            # `kernel[grid]`, also of kernels that are tuned or have heuristics
            launches = mock.patch.object(
                module.KernelInterface, "__getitem__", return_value=kernels.launch
            )
            stack.enter_context(launches)

        def exec_module(self: SourceFileLoader, module: ModuleType) -> None:
            execute(self, module)
            if module.__name__ in (NAME, TRITON):
                replace(module)

        for name in (NAME, TRITON):
            if name in sys.modules:
                replace(sys.modules[name])
        stack.enter_context(mock.patch.object(SourceFileLoader, "exec_module", exec_module))
        yield kernels
