"""Torch's fake mode with a shorter way to the same results.

FakeTensorMode computes what an operator returns once for each set of arguments and then takes it from a cache. For
the thousands of small operators of a traced step, describing the arguments (a dataclass of 17 fields per tensor)
takes longer than making the result, and making it longer than it need be. Four things are shorter here
(`scripts/bench_plan.py` measures):

- The description is one tuple. It leaves out where the arguments lie in their storages when the results are new
  memory, so that a loop over slices finds its results.
- What an operator returned before is made again from the results' forms, and a fake tensor from the attributes of the
  first one on its device.
- Views are taken by torch's own code for meta tensors and not by its decompositions in Python.
- Calls are not guarded against `torch.compile`, which planning never uses.

Where torch's rules say otherwise than the CPU's kernels do, `mpt.planner.cpu_routes` is asked first.

What is not plain (symbolic sizes, sparse tensors, constants, tensors of another mode) goes torch's way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
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


@dataclass(frozen=True, slots=True)
class Form:
    """What tells one new tensor from another."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an operator returns for arguments of certain forms: new tensors, arguments by their position, or None."""

    results: tuple[Form | int | None, ...]
    is_tuple: bool


_outcomes: dict[tuple[Any, ...], Outcome] = {}
"""By the description of an operator and its arguments; torch's own cache holds the same for as long as the process."""


class LeanFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes the same tensors as FakeTensorMode, sooner."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        """Device -> what every fake tensor on it has."""
        self._guard: Any = (
            torch._C._set_warn_deprecated_on_mutable_data_ptr
            if self._allow_unsafe_data_ptr_access
            else torch._C._set_throw_on_mutable_data_ptr
        )
        """Says, as torch's own constructor does, when the address of a fake tensor is asked for."""

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
            return self._fake(view, args[0].fake_device)
        key = self._description(func, args, kwargs)
        outcome = None if key is None else _outcomes.get(key)
        if outcome is not None:
            made = [self._make(form, args) for form in outcome.results]
            return tuple(made) if outcome.is_tuple else made[0]
        result = self._cached_dispatch_impl(func, types, args, kwargs)
        if key is not None:
            outcome = _learnt(func, FakeTensorMode.cache.get(fake_tensor._DispatchCacheKey(key)))
            if outcome is not None:
                _outcomes[key] = outcome
        return result

    def _make(self, form: Form | int | None, args: Sequence[Any]) -> Any:
        if form is None:
            return None
        if isinstance(form, int):
            return args[form]
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
        return self._fake(empty, form.device)

    def _fake(self, meta: Tensor, device: torch.device) -> FakeTensor:
        attributes = self._attributes.get(device)
        if attributes is None:
            made = FakeTensor(self, meta, device)
            self._attributes[device] = dict(vars(made))
            return made
        fake: Any = Tensor._make_subclass(
            FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        self._guard(fake)
        vars(fake).update(attributes)
        return fake  # type: ignore[no-any-return]

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
        key = self._description(func, args, kwargs)
        return super()._cache_key(state, func, args, kwargs) if key is None else fake_tensor._DispatchCacheKey(key)

    def _description(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return what an operator's results follow from; None where an argument is not plain."""
        facts: list[Any] = ["lean", func, torch.get_default_dtype(), torch._C._get_default_device()]
        facts.append(torch.is_inference_mode_enabled())
        places = not _returns_new(func)
        if not self._describe(args, places, facts):
            return None
        if kwargs and not self._describe(chain.from_iterable(kwargs.items()), places, facts):
            return None
        return tuple(facts)

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


def _learnt(func: Any, entry: Any) -> Outcome | None:
    """Return what torch's cache says about an operator's results, where that is plain."""
    if not isinstance(entry, fake_tensor._DispatchCacheValidEntry) or func.is_view:
        return None
    results: list[Form | int | None] = []
    for one in entry.output_infos:
        found = one.metadata
        if one.inplace_idx is not None:
            results.append(one.inplace_idx)
        elif found is None:
            if one.constant_value is not None:
                return None
            results.append(None)
        elif found.requires_grad or found.is_conj or found.is_neg or found.layout != torch.strided:
            return None
        else:
            shape, stride = (tuple(map(int, sizes)) for sizes in (found.shape, found.stride))  # type: ignore[arg-type]
            results.append(Form(shape, stride, found.dtype, found.device))
    return Outcome(tuple(results), entry.is_output_tuple)


@functools.cache
def _returns_new(func: Any) -> bool:
    """Return whether an operator's results are new memory by its schema."""
    return all(returned.alias_info is None for returned in func._schema.returns)
