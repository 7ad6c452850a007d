"""Kinds of operators and of their arguments, by which the shorter fake mode (`mpt.planner.device.fake_mode`) chooses.

Operators are compared by identity: their own hash is a function in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from mpt.planner.device import direct_results

NUMBERS = frozenset({int, float, bool})
PLAIN = frozenset(
    {
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
"""Types of arguments that are compared by value."""
_aten = torch.ops.aten
DEVICE_QUERY = torch.ops.prim.device.default
"""Asked of every fake tensor many times over; it computes nothing and is no operator of the step."""
VIEWS = frozenset({
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unbind.int,
    _aten.unsqueeze.default,
    # shares memory too, though its schema says otherwise; torch 2.15 caches it
    _aten._unsafe_view.default,
    _aten.view.default,
})  # fmt: skip
QUERIES = {
    DEVICE_QUERY,
    *fake_tensor._DISPATCH_META_HANDLERS,
    *fake_tensor._DISPATCH_HANDLE_DIRECTLY,
}
_profiler = torch.ops.profiler
RECORDS = {
    _profiler._record_function_enter_new.default,
    _profiler._record_function_exit._RecordFunction,
}
"""An optimizer's step is a range of the profiler. These have no tensors, and torch's rules take a millisecond."""
BLANKS = {
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
"""They make memory with nothing in it by the form of a tensor."""
VIEW_IDS, QUERY_IDS, RECORD_IDS, BLANK_IDS = (
    frozenset(map(id, funcs)) for funcs in (VIEWS, QUERIES, RECORDS, BLANKS)
)


class Facts(NamedTuple):
    """Facts of an operator's schema, which torch makes anew each time."""

    operator: Any
    """Kept, since facts are found by its identity."""
    name: str
    returns_new: bool
    """Whether its results are new memory."""
    changes_each: bool
    """Whether it is a `_foreach_` operator that changes its tensors and returns nothing."""


_facts: dict[int, Facts] = {}


def facts_of(func: Any) -> Facts:
    """Return the facts of an operator's schema."""
    found = _facts.get(id(func))
    if found is None:
        schema = func._schema
        is_new = all(returned.alias_info is None for returned in schema.returns)
        changes = schema.name.startswith(direct_results.FOREACH) and not schema.returns
        found = _facts[id(func)] = Facts(func, schema.name, is_new, changes)
    return found


def is_number(value: Any) -> bool:
    """Return whether this is a real tensor of one number on the CPU."""
    return (
        type(value) is Tensor
        and not value.dim()
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_quantized
    )


def is_elsewhere(value: Any, device: torch.device | None) -> bool:
    """Return whether a tensor with known values, be it a real one, is to go to a device that is not the CPU."""
    if device is None or device.type == "cpu":
        return False
    return is_known(value) or (type(value) in (Tensor, Parameter) and value.layout is torch.strided)


def is_known(value: Any) -> bool:
    """Return whether this is a fake tensor whose values are known."""
    return isinstance(value, FakeTensor) and value.constant is not None


def is_placed(device: torch.device | None) -> bool:
    """Return whether this is a device as tensors have it, with a number if there may be several."""
    return device is not None and (device.type == "cpu" or device.index is not None)


def fakes_in(values: Iterable[Any]) -> Iterator[FakeTensor]:
    """Yield the fake tensors among nested arguments."""
    for value in values:
        if isinstance(value, FakeTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from fakes_in(value)
