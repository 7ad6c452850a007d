"""Torch's fake mode with a shorter way to its cache of results.

FakeTensorMode computes what an operator returns once for each set of arguments and then takes it from a cache. For
the thousands of small operators of a traced step, describing the arguments (a dataclass of 17 fields per tensor)
takes longer than making the result. Here the same facts are one tuple, and calls are not guarded against
`torch.compile`, which planning never uses: a trace takes half as long (`scripts/bench_plan.py`).

What is not plain (symbolic sizes, sparse tensors, constants, tensors of another mode) gets torch's own key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that are compared by value."""
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
        return self._cached_dispatch_impl(func, types, args, kwargs)

    def _cache_key(self, state: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        facts: list[Any] = ["lean", func, torch.get_default_dtype(), torch._C._get_default_device()]
        facts.append(torch.is_inference_mode_enabled())
        if self._describe(args, facts) and self._describe(chain.from_iterable(kwargs.items()), facts):
            return fake_tensor._DispatchCacheKey(tuple(facts))
        return super()._cache_key(state, func, args, kwargs)

    def _describe(self, values: Iterable[Any], facts: list[Any]) -> bool:
        """Append what tells these arguments from others; False where one is not plain."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None or value.layout is not torch.strided:
                    return False
                facts += (
                    value.dtype,
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.untyped_storage().nbytes(),
                    value.fake_device,
                    value.requires_grad,
                    value.is_conj(),
                    value.is_neg(),
                    value.is_inference(),
                )
            elif kind in PLAIN:
                facts += (kind, value)  # 1, 1.0 and True are equal, and make different tensors
            elif kind in (list, tuple):
                facts += (kind, len(value))
                if not self._describe(value, facts):
                    return False
            else:
                return False
        return True
