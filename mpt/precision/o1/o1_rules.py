"""How O1 casts the arguments of one call: to half, to float32, to the widest, or not at all.

A rule takes (function, args, kwargs, region) and makes the call. Rules are found by the callable itself, not by its
name: `F.conv2d` and `torch.conv2d` are one callable, `Tensor.mm` and `torch.mm` are two.

float16, bfloat16, float32 and float64 are cast; float8, integers and complex numbers pass. A list or tuple is cast only
if all its elements are floating. A call with `out=` runs untouched, for its caller has chosen the result's dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpt.errors import MptError
from mpt.precision.o1 import o1_tables as tables

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
HALVES = frozenset({torch.float16, torch.bfloat16})
Call = Callable[..., Any]
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


class HalfPrecisionError(MptError, NotImplementedError):
    """A function that is unsafe or impossible in half precision was called with half-precision tensors."""

    exit_code = 6


class WeightCache:
    """Half copies of float32 parameters, connected to them by autograd, kept for one outermost region.

    A copy is dropped when its `requires_grad` differs from the parameter's while gradients are recorded, and when the
    parameter's version moved. Fused optimizers and `p.data = t` move no version, hence the life of one region only.
    """

    def __init__(self) -> None:
        self.copies: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor, int]] = {}

    def cast(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the parameter's copy in `dtype`, a new one if the kept one is stale."""
        key = (id(parameter), dtype)  # the entry holds the parameter, so the id stays its own
        version = 0 if parameter.is_inference() else parameter._version
        entry = self.copies.get(key)
        if entry is not None:
            _, copy, seen = entry
            connected = not torch.is_grad_enabled() or copy.requires_grad == parameter.requires_grad
            # A copy made in inference mode cannot be saved for backward.
            usable = torch.is_inference_mode_enabled() or not copy.is_inference()
            if connected and usable and seen == version:
                return copy
        copy = parameter.to(dtype)
        self.copies[key] = (parameter, copy, version)
        return copy


class Region:
    """The dtype and cache in force inside a `casts` block."""

    __slots__ = ("cache", "dtype")

    def __init__(self, dtype: torch.dtype, cache: WeightCache | None) -> None:
        self.dtype, self.cache = dtype, cache


def cast(value: Any, dtype: torch.dtype, cache: WeightCache | None = None) -> Any:
    """Cast a tensor, or a list or tuple of floating tensors only; return anything else as it is."""
    if isinstance(value, Tensor):
        found = value.dtype
        if found is dtype or found not in CASTABLE:
            return value
        if cache is not None and found is torch.float32 and isinstance(value, nn.Parameter):
            return cache.cast(value, dtype)
        return value.to(dtype)
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(item, Tensor) and item.dtype in CASTABLE for item in value)
    ):
        items = [cast(item, dtype, cache) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def floating_dtypes(values: Any) -> set[torch.dtype]:
    """Return the castable dtypes among the tensors of a sequence, one list or tuple deep."""
    found: set[torch.dtype] = set()
    for value in values:
        if isinstance(value, Tensor):
            found.add(value.dtype)
        elif isinstance(value, list | tuple):
            found.update(item.dtype for item in value if isinstance(item, Tensor))
    return found & CASTABLE


def run_in_half(function: Call, args: Arguments, kwargs: Keywords, region: Region) -> Any:
    """Call with every floating argument in the region's dtype."""
    if kwargs.get("out") is not None:
        return function(*args, **kwargs)
    dtype, cache = region.dtype, region.cache
    if kwargs:
        kwargs = {name: cast(value, dtype, cache) for name, value in kwargs.items()}
    return function(*[cast(value, dtype, cache) for value in args], **kwargs)


def run_in_float(function: Call, args: Arguments, kwargs: Keywords, region: Region) -> Any:
    """Call with every floating argument in float32. `dtype=` is no tensor, so it is honoured."""
    if kwargs.get("out") is not None:
        return function(*args, **kwargs)
    if kwargs:
        kwargs = {name: cast(value, torch.float32) for name, value in kwargs.items()}
    return function(*[cast(value, torch.float32) for value in args], **kwargs)


def run_in_widest(function: Call, args: Arguments, kwargs: Keywords, region: Region) -> Any:
    """Call with every floating argument in the widest dtype among them; 0-dimensional tensors count."""
    dtypes = floating_dtypes(args)
    if kwargs:
        dtypes |= floating_dtypes(kwargs.values())
    if len(dtypes) < 2 or kwargs.get("out") is not None:
        return function(*args, **kwargs)
    widest = dtypes.pop()
    while dtypes:
        widest = torch.promote_types(widest, dtypes.pop())
    kwargs = {name: cast(value, widest) for name, value in kwargs.items()}
    return function(*[cast(value, widest) for value in args], **kwargs)


def run_in_half_if_mixed(function: Call, args: Arguments, kwargs: Keywords, region: Region) -> Any:
    """Call with every floating argument in the region's dtype if their dtypes differ; else as it is."""
    if len(floating_dtypes([*args, *kwargs.values()])) < 2:
        return function(*args, **kwargs)
    return run_in_half(function, args, kwargs, region)


def lift_half(function: Call, args: Arguments, kwargs: Keywords, region: Region) -> Any:
    """Call with half-precision arguments in float32; other floating arguments as they are."""
    if not floating_dtypes([*args, *kwargs.values()]) & HALVES or kwargs.get("out") is not None:
        return function(*args, **kwargs)

    def lift(value: Any) -> Any:
        return cast(value, torch.float32) if floating_dtypes([value]) & HALVES else value

    return function(
        *[lift(value) for value in args], **{name: lift(value) for name, value in kwargs.items()}
    )


def run_like_self(function: Call, args: Arguments, kwargs: Keywords, region: Region) -> Any:
    """Call an in-place method with its other arguments in the dtype of the tensor that it changes."""
    own = args[0].dtype
    if own not in CASTABLE:
        return function(*args, **kwargs)
    kwargs = {name: cast(value, own) for name, value in kwargs.items()}
    return function(args[0], *[cast(value, own) for value in args[1:]], **kwargs)


def refuse_half_self(function: Call, args: Arguments, kwargs: Keywords, region: Region) -> Any:
    """Call an in-place float32 method with its other arguments in float32, or refuse a half-precision self."""
    if args[0].dtype in HALVES:
        raise _in_place_error(function, args[0].dtype)
    kwargs = {name: cast(value, torch.float32) for name, value in kwargs.items()}
    return function(args[0], *[cast(value, torch.float32) for value in args[1:]], **kwargs)


def refuse_half(function: Call, args: Arguments, kwargs: Keywords, region: Region) -> Any:
    """Call an in-place float32 function, or refuse any half-precision argument."""
    halves = floating_dtypes([*args, *kwargs.values()]) & HALVES
    if halves:
        raise _in_place_error(function, halves.pop())
    return function(*args, **kwargs)


def refuse_banned(function: Call, args: Arguments, kwargs: Keywords, region: Region) -> Any:
    """Call a banned function on float32, or refuse any half-precision argument with the way out."""
    halves = floating_dtypes([*args, *kwargs.values()]) & HALVES
    if halves:
        raise HalfPrecisionError(
            f"binary_cross_entropy got a {halves.pop()} tensor under O1: its logarithms underflow in half precision. "
            "Leave out the model's final sigmoid and use binary_cross_entropy_with_logits, or pass float32 tensors"
        )
    return function(*args, **kwargs)


def _in_place_error(function: Call, dtype: torch.dtype) -> HalfPrecisionError:
    name = getattr(function, "__name__", str(function))
    return HalfPrecisionError(
        f"{name} cannot change a {dtype} tensor in place under O1: it belongs in float32, which the tensor "
        f"cannot hold. Use {name.rstrip('_')}, which returns a float32 result"
    )


_UNMASKED: dict[Call, Call] = {}
_NO_OVERRIDES = {
    name: lambda *_: False
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


def unmask(composite: FunctionType) -> Call:
    """Return a composite that runs its body at once instead of offering itself to the mode again.

    A composite starts by asking whether a mode is active, which would lead straight back here. The twin has the same
    code, but its own globals, in which that question is answered with no.
    """
    if composite not in _UNMASKED:
        twin = FunctionType(
            composite.__code__,
            {**composite.__globals__, **_NO_OVERRIDES},
            composite.__name__,
            composite.__defaults__,
            composite.__closure__,
        )
        twin.__kwdefaults__ = composite.__kwdefaults__
        _UNMASKED[composite] = twin
    return _UNMASKED[composite]


def _resolve(owner: Any, names: list[str], rule: Call) -> dict[Call, Call]:
    return {getattr(owner, name): rule for name in names if hasattr(owner, name)}


def _methods(names: list[str], rule: Call) -> dict[Call, Call]:
    seen = [tables.OPERATOR_METHODS.get(name, name) for name in names]
    return _resolve(Tensor, [*names, *seen], rule)


BUILT_IN: dict[Call, Call] = {
    **_resolve(torch, tables.HALF_TORCH, run_in_half),
    **_resolve(functional, tables.HALF_FUNCTIONAL, run_in_half),
    **_resolve(torch, tables.HALF_RECURRENT, run_in_half),
    **_methods([*tables.HALF_TORCH, *tables.HALF_TENSOR], run_in_half),
    **_resolve(torch, tables.PROMOTE_TORCH, run_in_widest),
    **_methods([*tables.PROMOTE_TORCH, *tables.PROMOTE_TENSOR], run_in_widest),
    **_resolve(torch, tables.SEQUENCE_TORCH, run_in_widest),
    **_resolve(torch, tables.FLOAT_TORCH, run_in_float),
    **_resolve(functional, tables.FLOAT_FUNCTIONAL, run_in_float),
    **_methods([*tables.FLOAT_TORCH, *tables.FLOAT_TENSOR], run_in_float),
    **_resolve(torch, tables.NO_HALF_TORCH, refuse_half),
    **_methods(tables.NO_HALF_TENSOR, refuse_half_self),
    **_methods(tables.MATCH_SELF_TENSOR, run_like_self),
    **_resolve(functional, tables.BANNED_FUNCTIONAL, refuse_banned),
    **_resolve(torch, tables.MIXED_TO_HALF_TORCH, run_in_half_if_mixed),
    **_resolve(functional, tables.MIXED_TO_HALF_FUNCTIONAL, run_in_half_if_mixed),
    **_resolve(torch.linalg, tables.MIXED_TO_HALF_LINALG, run_in_half_if_mixed),
    **_resolve(torch, tables.MIXED_TO_WIDEST_TORCH, run_in_widest),
    **_methods(tables.MIXED_TO_WIDEST_TORCH, run_in_widest),
    **_resolve(torch, tables.HALF_TO_FLOAT_TORCH, lift_half),
    **_methods(tables.HALF_TO_FLOAT_TORCH, lift_half),
    **_resolve(functional, tables.HALF_TO_FLOAT_FUNCTIONAL, lift_half),
    **_resolve(torch.linalg, tables.HALF_TO_FLOAT_LINALG, lift_half),
    **_resolve(torch.fft, tables.HALF_TO_FLOAT_FFT, lift_half),
    # `**=` shares its code with pow_, but Apex lists it with the float32 functions.
    **_resolve(Tensor, ["__ipow__"], run_in_float),
}
COMPOSITES = frozenset(
    getattr(functional, name) for name in tables.COMPOSITES_FUNCTIONAL if hasattr(functional, name)
)
registered: dict[Call, Call] = {}
"""The user's own rules, which win over the built-in ones."""
rules: dict[Call, Call] = dict(BUILT_IN)
"""The mode's rules by callable: the built-in ones with the user's on top."""
lock = threading.Lock()


def register_rule(functions: list[Call], rule: Call | None) -> None:
    """Give callables a rule that wins over the built-in lists; None returns them to those lists."""
    with lock:
        for function in functions:
            registered.pop(function, None)
            rules.pop(function, None)
            if rule is not None:
                registered[function] = rules[function] = rule
            elif function in BUILT_IN:
                rules[function] = BUILT_IN[function]
