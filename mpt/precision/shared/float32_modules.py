"""Regions of float32 inside a lower-precision run: modules by glob, and loss functions.

Such a module keeps float32 parameters, gets its floating inputs cast up and runs with autocast and O1 switched
off. The module's class is swapped for a subclass rather than its `forward` replaced on the instance: a deep copy (an
EMA twin) then owns its methods instead of calling into the original.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mpt.nn.shared.mixin import Mixin, become, mix_in
from mpt.precision import o1
from mpt.precision.o1.o1_mode import active_region
from mpt.seams import Precision

F = TypeVar("F", bound=Callable[..., Any])


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating tensor in a nested structure to `dtype`; leave the rest alone."""
    # The plain cases first: every loss of every step passes here, and tree_map takes longer than a small kernel.
    kind = type(value)
    if kind is Tensor:
        return value.to(dtype) if value.is_floating_point() else value
    if kind is tuple or kind is list:
        return kind([cast_floating(item, dtype) for item in value])
    if kind is dict:
        return {key: cast_floating(item, dtype) for key, item in value.items()}
    if value is None or kind in (float, int, bool, str):
        return value
    return tree_map(
        lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, value
    )


@contextlib.contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Switch off torch's autocast and O1's casts inside the block."""
    with torch.autocast(device_type, enabled=False), o1.suspended():
        yield


def in_float32(function: F, device_type: str) -> F:
    """Wrap a function so that it runs in full precision on float32 copies of its floating tensors."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # As `full_precision`, without making its contexts: they would take 50 us of every step.
        wide = [cast_floating(value, torch.float32) for value in args]
        named = cast_floating(kwargs, torch.float32) if kwargs else kwargs
        enabled = torch.is_autocast_enabled(device_type)
        if enabled:
            torch.set_autocast_enabled(device_type, False)
        try:
            if active_region() is None:
                return function(*wide, **named)
            with o1.suspended():
                return function(*wide, **named)
        finally:
            if enabled:
                torch.set_autocast_enabled(device_type, True)

    return run  # type: ignore[return-value]


class Float32Module(Mixin, nn.Module):
    """Mixed in front of a module's class by `keep_in_float32`."""

    is_outermost = True
    float32_device_type: str
    float32_casts_back: bool
    float32_outer_dtype: torch.dtype | None
    """The dtype of outputs if no input is floating, as an embedding's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward in float32; under O2 and O3 the outputs return in the first input's dtype."""
        return run_in_float32(self, super().forward, args, kwargs)


def run_in_float32(module: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a bound method of a `Float32Module` on float32 inputs, with autocast and O1 off."""
    dtypes = [
        a.dtype
        for a in (*args, *kwargs.values())
        if isinstance(a, Tensor) and a.is_floating_point()
    ]
    with full_precision(module.float32_device_type):
        outputs = function(
            *cast_floating(args, torch.float32), **cast_floating(kwargs, torch.float32)
        )
    outer = dtypes[0] if dtypes else module.float32_outer_dtype
    return (
        cast_floating(outputs, outer)
        if module.float32_casts_back and outer is not None
        else outputs
    )


def keep_in_float32(
    module: nn.Module, device_type: str, casts_back: bool, half: torch.dtype | None = None
) -> None:
    """Make one module run in float32, in place. Its state-dict keys do not change.

    It does so whichever of its public methods is called (`encode`, `decode`): each runs as its forward does.
    """
    if isinstance(module, Float32Module):
        return
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.is_floating_point() and tensor.dtype != torch.float32 for tensor in tensors):
        module.float()  # fake parameters refuse even the swap that changes nothing
    methods = {
        name: _float32_method(function) for name, function in own_methods(type(module)).items()
    }
    mix_in(module, Float32Module, methods)
    module.float32_device_type = device_type  # type: ignore[assignment]
    module.float32_casts_back = casts_back  # type: ignore[assignment]
    module.float32_outer_dtype = half  # type: ignore[assignment]


def answer_in_float32(modules: Sequence[nn.Module]) -> None:
    """Let modules inside of such modules return float32 if no input is floating, as an embedding does."""
    for module in modules:
        # these have no forward to be inside of
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            for inner in module.modules():
                if inner is not module and isinstance(inner, Float32Module):
                    inner.float32_outer_dtype = None


def release(module: nn.Module) -> None:
    """Undo `keep_in_float32` of a module that it changed last."""
    mixin, original = type(module).__bases__
    assert mixin is Float32Module
    become(module, original)
    for name in ("float32_device_type", "float32_casts_back", "float32_outer_dtype"):
        delattr(module, name)


@contextlib.contextmanager
def keeping(precision: Precision, modules: Sequence[nn.Module]) -> Iterator[int]:
    """Keep modules in float32 inside the block, as far as the mode can; yield the number not kept before."""
    changed = [module for module in modules if precision.keep_float32(module)]
    try:
        yield len(changed)
    finally:
        for module in changed:
            release(module)


def own_methods(kind: type) -> dict[str, FunctionType]:
    """Return the public methods alongside forward by which a module's class can be entered.

    torch's own have none, and those of mixins are no entries: memory tricks ask for weights by them.
    """
    found: dict[str, FunctionType] = {}
    for owner in kind.__mro__:
        if owner.__module__.startswith("torch."):
            break
        if Mixin in owner.__bases__:
            continue
        for name, value in vars(owner).items():
            if (
                isinstance(value, FunctionType)
                and not name.startswith("_")
                and not hasattr(nn.Module, name)
            ):
                found.setdefault(name, value)
    return found


def _float32_method(function: FunctionType) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run_in_float32(self, functools.partial(function, self), args, kwargs)

    return run
