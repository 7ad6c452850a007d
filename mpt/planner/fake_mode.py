"""Torch's fake mode with a shorter way to the same results.

FakeTensorMode computes what an operator returns once for each set of arguments and then takes it from a cache. For
the thousands of small operators of a traced step, describing the arguments (a dataclass of 17 fields per tensor)
takes longer than making the result. Three things are shorter here, and a trace takes some six tenths of the time
(`scripts/bench_plan.py`):

- The description is one tuple. It leaves out where the arguments lie in their storages when the results are new
  memory, so that a loop over slices finds its results.
- Views are taken by torch's own code for meta tensors and not by its decompositions in Python.
- Calls are not guarded against `torch.compile`, which planning never uses.

Where torch's rules say otherwise than the CPU's kernels do, `mpt.planner.cpu_routes` is asked first.

What is not plain (symbolic sizes, sparse tensors, constants, tensors of another mode) goes torch's way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mpt.planner import cpu_routes

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that are compared by value."""
_aten = torch.ops.aten
VIEWS = frozenset({
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
})  # fmt: skip
_QUERIES = {torch.ops.prim.device.default, *fake_tensor._DISPATCH_META_HANDLERS, *fake_tensor._DISPATCH_HANDLE_DIRECTLY}


class LeanFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes the same tensors as FakeTensorMode, sooner."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while planning

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _QUERIES:
            return self.dispatch(func, types, args, kwargs)
        if func in VIEWS and not kwargs and self._is_plain(args[0]):
            with fake_tensor.in_kernel_invocation_manager(self):
                view = func(*args)
            return FakeTensor(self, view, args[0].fake_device)
        return self._cached_dispatch_impl(func, types, args, kwargs)

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        route = cpu_routes.ROUTES.get(func)
        result = NotImplemented if route is None else route(func, *args, **kwargs)
        return super()._dispatch_impl(func, types, args, kwargs) if result is NotImplemented else result

    def _is_plain(self, value: Any) -> bool:
        return (
            type(value) is FakeTensor
            and value.fake_mode is self
            and value.constant is None
            and value.layout is torch.strided
        )

    def _cache_key(self, state: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        facts: list[Any] = ["lean", func, torch.get_default_dtype(), torch._C._get_default_device()]
        facts.append(torch.is_inference_mode_enabled())
        places = not _returns_new(func)
        named = chain.from_iterable(kwargs.items())
        if self._describe(args, places, facts) and self._describe(named, places, facts):
            return fake_tensor._DispatchCacheKey(tuple(facts))
        return super()._cache_key(state, func, args, kwargs)

    def _describe(self, values: Iterable[Any], places: bool, facts: list[Any]) -> bool:
        """Append what tells these arguments from others; False where one is not plain."""
        for value in values:
            kind = type(value)
            if kind in PLAIN:
                facts += (kind, value)  # 1, 1.0 and True are equal, and make different tensors
            elif self._is_plain(value):
                facts += (
                    value.dtype,
                    value.shape,
                    value.stride(),
                    value.fake_device,
                    value.requires_grad,
                    value.is_conj(),
                    value.is_neg(),
                    value.is_inference(),
                )
                if places:
                    facts += (value.storage_offset(), value.untyped_storage().nbytes())
            elif kind in (list, tuple):
                facts += (kind, len(value))
                if not self._describe(value, places, facts):
                    return False
            else:
                return False
        return True


@functools.cache
def _returns_new(func: Any) -> bool:
    """Return whether an operator's results are new memory by its schema."""
    return all(returned.alias_info is None for returned in func._schema.returns)
