"""Results of operators on plain fake tensors of one device, found without torch's rules for fake tensors.

Torch's rules run many an operator's decomposition, in Python and on fake tensors: a batch norm of them takes
milliseconds, a plan has hundreds of kinds of arguments. The same forms follow sooner:

- of the operators in `BY_META` from the one kernel that torch has for meta tensors;
- of a batch norm over images that lie densely, of a group norm in float32 and of a copy from its arguments;
- of a picture's reflected or replicated borders, which are contiguous on a card; torch's rule has them in channels_last
  as the CPU's kernel (`aten/src/ATen/native/cuda/ReflectionPad.cu`);
- of `torch._foreach_...` from the single operator for each element, or there is nothing to return.

In a release of torch that is not among `REVIEWED` nothing is taken from here. A test compares the traces of both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpt.planner.device.outcomes import Form, Outcome, Result

REVIEWED = ("2.13", "2.14", "2.15")
_aten = torch.ops.aten


NAMES = """
add.Tensor add.Scalar add_.Tensor add_.Scalar sub.Tensor sub.Scalar sub_.Tensor mul.Tensor mul.Scalar mul_.Tensor
mul_.Scalar div.Tensor div.Scalar div_.Tensor div_.Scalar rsub.Scalar addcmul.default addcmul_.default addcdiv.default
addcdiv_.default lerp.Scalar lerp_.Scalar neg.default abs.default sqrt.default rsqrt.default rsqrt_.default exp.default
log.default reciprocal.default pow.Tensor_Scalar sigmoid.default sigmoid_backward.default tanh.default
tanh_backward.default relu.default relu_.default threshold_backward.default leaky_relu.default leaky_relu_.default
leaky_relu_backward.default gelu.default gelu_backward.default silu.default silu_.default silu_backward.default
clamp.default
clamp_min.default clamp_max.default maximum.default minimum.default where.self ge.Scalar gt.Scalar le.Scalar lt.Scalar
eq.Scalar ne.Scalar ge.Tensor gt.Tensor le.Tensor lt.Tensor eq.Tensor ne.Tensor logical_and.default logical_not.default
mm.default addmm.default bmm.default baddbmm.default sum.default sum.dim_IntList mean.default mean.dim amax.default
aminmax.default cat.default clone.default copy_.default fill_.Scalar zero_.default _softmax.default
_softmax_backward_data.default _log_softmax.default _log_softmax_backward_data.default native_layer_norm.default
native_layer_norm_backward.default
"""
"""Operators whose kernel for meta tensors agrees with torch's rules."""
BY_META: frozenset[Any] = frozenset(
    getattr(getattr(_aten, packet), overload)
    for packet, overload in (name.split(".") for name in NAMES.split())
)
PLACED = frozenset({
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.new_zeros.default,
    _aten.new_full.default,
})  # fmt: skip
"""The same, of operators with a device among their arguments: the result is there."""
FOREACH = "aten::_foreach_"
SINGLE = {"List": "Tensor", "Scalar": "Scalar", "default": "default"}
"""Overload of a `_foreach_` operator -> that of the operator for one element."""
SINGLES = frozenset({"add", "sub", "mul", "div", "sqrt", "neg", "abs", "reciprocal"})
COMPUTED_IN_FLOAT32 = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""Dtypes of values whose batch norm has its statistics in float32."""


def form_of(tensor: Tensor, device: torch.device) -> Form:
    """Return a tensor's form as if it were on a device."""
    return Form(tuple(tensor.shape), tensor.stride(), tensor.dtype, device)


def learnt(result: Any, args: Sequence[Any], device: torch.device) -> Outcome | None:
    """Move the result of a kernel for meta tensors to the device; None for anything but tensors."""
    container = type(result) if isinstance(result, tuple | list) else None
    found: list[Result] = []
    for one in [result] if container is None else result:
        position = next((place for place, arg in enumerate(args) if arg is one), None)
        if one is None:
            found.append(None)
        elif not isinstance(one, Tensor):
            return None
        else:
            found.append(form_of(one, device) if position is None else position)
    return Outcome(
        tuple(found), None if container is None else list if container is list else tuple
    )


def is_dense(tensor: Tensor) -> bool:
    """Return whether the order of a tensor's dimensions in memory is beyond doubt, with no gaps."""
    if min(tensor.shape, default=0) < 2:
        return False
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def batch_norm(
    args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Outcome | None:
    """Return a batch norm's results; None if they are not plain."""
    values = args[0]
    if (
        kwargs
        or values.dtype not in COMPUTED_IN_FLOAT32
        or device.type == "cpu"
        or not is_dense(values)
    ):
        return None
    if any(isinstance(one, Tensor) and one.dtype != torch.float32 for one in args[1:5]):
        return None
    statistic = Form((values.shape[1],), (1,), torch.float32, device)
    return Outcome((form_of(values, device), statistic, statistic), tuple)


def batch_norm_backward(
    args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Outcome | None:
    """Return the results of a batch norm's backward; None if they are not plain."""
    gradient, values, weight, wanted = args[0], args[1], args[2], args[-1]
    if kwargs or values.dtype not in COMPUTED_IN_FLOAT32 or device.type == "cpu" or weight is None:
        return None
    if (
        not is_dense(values)
        or gradient.stride() != values.stride()
        or gradient.shape != values.shape
    ):
        return None
    if (
        any(isinstance(one, Tensor) and one.dtype != torch.float32 for one in args[2:7])
        or not wanted[0]
    ):
        return None
    own = Form((values.shape[1],), (1,), weight.dtype, device)
    return Outcome((form_of(values, device), *(own if one else None for one in wanted[1:])), tuple)


def group_norm(
    args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Outcome | None:
    """Return a group norm's results; None if they are not plain."""
    values, batch, groups = args[0], args[3], args[6]
    if kwargs or not _is_plain_in_float32(args[:3], device):
        return None
    statistic = Form((batch, groups), (groups, 1), torch.float32, device)
    return Outcome((form_of(values, device), statistic, statistic), tuple)


def group_norm_backward(
    args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Outcome | None:
    """Return the results of a group norm's backward; None if they are not plain."""
    values, wanted = args[1], args[-1]
    if kwargs or not wanted[0] or not _is_plain_in_float32(args[:5], device):
        return None
    own = Form((values.shape[1],), (1,), torch.float32, device)
    return Outcome((form_of(values, device), *(own if one else None for one in wanted[1:])), tuple)


def _is_plain_in_float32(tensors: Sequence[Any], device: torch.device) -> bool:
    """Return whether these are tensors of float32 that lie in order. The CPU has kernels of its own."""
    return device.type != "cpu" and all(
        isinstance(one, Tensor)
        and one.dtype == torch.float32
        and one.is_contiguous()
        and min(one.shape, default=0) > 1
        for one in tensors
    )


def copied(args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Outcome | None:
    """Return the copy of a tensor that lies in order; None for others, and for one in another order."""
    values, place = args[0], kwargs.get("device") or device
    if (
        len(args) > 1
        or not values.is_contiguous()
        or not values.numel()
        or kwargs.get("memory_format") not in (None, torch.preserve_format)
        or kwargs.get("layout") not in (None, torch.strided)
        or kwargs.get("pin_memory")
        or not (place.type == "cpu" or place.index is not None)
    ):
        return None
    dtype = kwargs.get("dtype") or values.dtype
    return Outcome((Form(tuple(values.shape), values.stride(), dtype, place),))


def padded(args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Outcome | None:
    """Return a picture with borders of its own pixels; None on a CPU, and for wrong borders."""
    values, sides = args[0], args[1]
    if kwargs or device.type == "cpu" or len(sides) != 4 or values.dim() not in (3, 4):
        return None
    height, width = values.shape[-2] + sum(sides[2:]), values.shape[-1] + sum(sides[:2])
    if min(*sides, *values.shape) < 0 or max(sides) >= min(values.shape[-2:]):
        return None
    shape = (*values.shape[:-2], height, width)
    stride = torch.empty(shape, device="meta").stride()
    return Outcome((Form(shape, stride, values.dtype, device),))


RULES: dict[Any, Callable[[Sequence[Any], Mapping[str, Any], torch.device], Outcome | None]] = {
    _aten.native_batch_norm.default: batch_norm,
    _aten.native_batch_norm_backward.default: batch_norm_backward,
    _aten.native_group_norm.default: group_norm,
    _aten.native_group_norm_backward.default: group_norm_backward,
    _aten._to_copy.default: copied,
    _aten.reflection_pad2d.default: padded,
    _aten.replication_pad2d.default: padded,
}
"""Operator -> function that computes its outcome from its arguments and their common device."""


def single_operator(func: Any) -> Any:
    """Return the operator for one element of a `_foreach_` operator; None if there is none here."""
    name = func._schema.name.removeprefix(FOREACH)
    overload = SINGLE.get(func._overloadname)
    return getattr(getattr(_aten, name), overload) if name in SINGLES and overload else None
