"""Apex's O1 as a scoped library: under `with casts():` matrix products run in half precision, delicate ones in float32.

Apex patched torch for the life of the process, so that its casts leaked into other models and could not be taken back.
Here a `TorchFunctionMode` sees every call made in the block, on this thread, and nothing outside it. Calls that no mode
can see are replaced for the time of the block: the places in torch that `o1_torch` lists, and functions of other
packages that a user registered.

Half copies of parameters are kept until the outermost block ends, see `o1_rules.WeightCache`.

Not done here: loss scaling and the precision mode of the YAML file, see `mpt.precision.apex_o1`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, get_testing_overrides

from mpt.precision.o1 import o1_rules
from mpt.precision.o1.o1_rules import Region, WeightCache
from mpt.precision.o1.o1_tables import OPERATOR_METHODS
from mpt.precision.o1.o1_torch import Replacements, replacements_in_torch

F = TypeVar("F", bound=Callable[..., Any])


class _Casts(TorchFunctionMode):
    """Applies the rules of this thread's innermost region. One per thread; its state is in the thread's regions."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Attribute getters come through here too: the miss must be the fast way.
        rule = o1_rules.rules.get(function)
        if rule is not None:
            region = _thread.regions[-1]
            if region is not None:
                return rule(function, args, kwargs or {}, region)
        elif function in o1_rules.COMPOSITES and _thread.regions[-1] is not None:
            # Torch took the mode off the stack for this call; the composite's own calls need it back.
            with self:
                return o1_rules.unmask(function)(*args, **(kwargs or {}))  # type: ignore[arg-type]
        return function(*args, **kwargs) if kwargs else function(*args)


def _function_modes() -> list[TorchFunctionMode]:
    return [
        torch._C._get_function_stack_at(depth)
        for depth in range(torch._C._len_torch_function_stack())
    ]


class _Thread(threading.local):
    """The state of this thread: the regions, innermost last (None if suspended), and the weight cache."""

    def __init__(self) -> None:
        self.regions: list[Region | None] = []
        self.pushed: list[bool] = []
        self.mode = _Casts()
        self.cache = WeightCache()


_thread = _Thread()


class casts(ContextDecorator):
    """Run the block under O1's casts, in `dtype` (float16 or bfloat16).

    Blocks nest: the innermost decides. `cache` keeps half copies of parameters for the life of the outermost block. One
    object may be entered again, also while it is entered.
    """

    def __init__(self, dtype: torch.dtype = torch.float16, cache: bool = True) -> None:
        if dtype not in o1_rules.HALVES:
            raise ValueError(f"casts: dtype is torch.float16 or torch.bfloat16, not {dtype}")
        self.dtype, self.cache = dtype, cache

    def __enter__(self) -> None:
        # The mode may be missing from the stack although a region is open: torch takes it off while a call is handled,
        # Tensor.backward among them, and recomputation inside backward needs it back.
        push = not any(mode is _thread.mode for mode in _function_modes())
        _standing.open()
        _thread.regions.append(Region(self.dtype, _thread.cache if self.cache else None))
        _thread.pushed.append(push)
        if push:
            _thread.mode.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        _thread.regions.pop()
        if _thread.pushed.pop():
            _thread.mode.__exit__(*exception)  # type: ignore[no-untyped-call]
        _standing.close()
        if not _thread.regions:
            _thread.cache.copies.clear()


class suspended(ContextDecorator):
    """Switch O1's casts off inside the block (a module kept in float32, a loss). Does nothing if none are."""

    def __enter__(self) -> None:
        _thread.regions.append(None)

    def __exit__(self, *exception: Any) -> None:
        _thread.regions.pop()
        if not _thread.regions:
            _thread.cache.copies.clear()


def active_region() -> Region | None:
    """Return the casts of this thread, or None."""
    return _thread.regions[-1] if _thread.regions else None


def active_dtype() -> torch.dtype | None:
    """Return the half dtype in force on this thread, or None outside `casts` and inside `suspended`."""
    region = active_region()
    return None if region is None else region.dtype


def clear_cache() -> None:
    """Forget this thread's half copies of parameters, for weights changed in a block by `p.data` or the like."""
    _thread.cache.copies.clear()


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts with which `torch.utils.checkpoint.checkpoint` recomputes in the dtypes of the forward.

    Hand it over: `checkpoint(function, ..., use_reentrant=False, context_fn=checkpoint_contexts)`. No mode is active
    during backward, so without it the recomputation would run in float32.
    """
    return nullcontext(), (recall() or suspended)()


def recall() -> Callable[[], AbstractContextManager[None]] | None:
    """Return a function that re-enters the present context later or on another thread; None outside `casts`."""
    if not _thread.regions:
        return None
    region = _thread.regions[-1]
    if region is None:
        return suspended
    return functools.partial(casts, region.dtype, region.cache is not None)


def _decorate(function: F, rule: Callable[..., Any]) -> F:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        region = active_region()
        return function(*args, **kwargs) if region is None else rule(function, args, kwargs, region)

    return run  # type: ignore[return-value]


def half_function(function: F) -> F:
    """Decorate a function to get its floating arguments in half precision wherever casts are on."""
    return _decorate(function, o1_rules.run_in_half)


def float_function(function: F) -> F:
    """Decorate a function to get its floating arguments in float32 wherever casts are on."""
    return _decorate(function, o1_rules.run_in_float)


def promote_function(function: F) -> F:
    """Decorate a function to get its floating arguments in the widest dtype among them wherever casts are on."""
    return _decorate(function, o1_rules.run_in_widest)


def register_half_function(module: Any, name: str) -> None:
    """Run `module.name` in half precision wherever casts are on. ValueError if the module has no such function."""
    _register(module, name, o1_rules.run_in_half)


def register_float_function(module: Any, name: str) -> None:
    """Run `module.name` in float32 wherever casts are on. ValueError if the module has no such function."""
    _register(module, name, o1_rules.run_in_float)


def register_promote_function(module: Any, name: str) -> None:
    """Run `module.name` in the widest dtype of its arguments wherever casts are on. ValueError if it does not exist."""
    _register(module, name, o1_rules.run_in_widest)


def unregister_function(module: Any, name: str) -> None:
    """Take a registration back; the built-in lists count again for that function."""
    _register(module, name, None)


def _register(module: Any, name: str, rule: Callable[..., Any] | None) -> None:
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(
            f"no function {name!r} in {getattr(module, '__name__', module)}: check the spelling"
        )
    function = _standing.original(module, name) or function
    if function in o1_rules.BUILT_IN or function in get_testing_overrides():
        functions = [function]
        if module is Tensor and name in OPERATOR_METHODS:
            functions.append(getattr(Tensor, OPERATOR_METHODS[name]))
        o1_rules.register_rule(functions, rule)
    else:
        _standing.want(
            module, name, None if rule is None else functools.partial(_decorate, rule=rule)
        )


_standing = Replacements()
for _owner, _name, _make in replacements_in_torch(recall):
    _standing.want(_owner, _name, _make)
