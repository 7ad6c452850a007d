"""The cost of one operator of a step: the kernels that it launches, each with its arithmetic and its memory traffic.

Floating-point operations come from torch's flop counter, bytes from the operator's tensors. A convolution is more than
one kernel, and three things about it are seen in published times and not in its operations:

- Its backward pass is a kernel for each gradient. Torch's counter takes the weight gradient of a grouped convolution
  for a dense one, that is for so many times more as there are groups.
- Tensor cores work on tiles: a group of fewer channels than `GROUP_TILE` takes the time of a whole tile. One channel a
  group is no matrix product: those kernels wait for memory, the one of the weight gradient much longer.
- In half precision and in TF32 cuDNN computes in channels_last, so that a convolution of contiguous tensors copies
  them.

A batch normalization of contiguous tensors is a block of threads for each channel, and a card with more
multiprocessors than there are channels leaves the others idle. The gradients of a layer normalization are two kernels,
of which each reads the input and its gradient.

The constants are fitted to half of timm's tables of training speeds on an RTX 3090 and checked on the other half
(`scripts/plans/check_timm_times.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from mpt.planner.device.grouped_products import GROUPED, count_operations
from mpt.planner.device.outcomes import Cost, Kernel, Unit
from mpt.planner.trace.kernel_scratch import ATTENTION
from mpt.run.process.storage_trace import tensors_in

GROUP_TILE = 64
"""Channels that a group of a convolution is computed as if it had, at least."""
DEPTHWISE_SLOWDOWN = 6.0
"""How many times longer than its memory traffic the weight gradient of a depthwise convolution takes."""
DEPTHWISE_LOADS = 8.0
"""Time of a product in torch's general depthwise kernel, in products of a matrix: it loads both factors of each, and a
multiprocessor has a quarter as many units that load as that multiply."""
SPECIAL_SIDES = (1, 3, 5)
"""Windows for which torch compiles its depthwise kernel, which then keeps the weights."""
LAYOUT_SHARE = 1.2
"""Memory traffic of the copies to channels_last and back, of the convolution's own."""
GRADIENT_SHARE = 0.6
"""Of a backward convolution's tensors, how much each of its two kernels reads and writes: gradient and one more."""
BACKWARD_ELEMENTS = 2.5
"""Time for an element of a channel in the backward pass of a batch normalization, in that of the forward pass: cuDNN's
kernels on an H100."""
HALF = (torch.float16, torch.bfloat16)
VIEWS = (
    "view reshape _reshape_alias expand permute transpose t slice select unsqueeze squeeze detach alias as_strided "
    "_unsafe_view split split_with_sizes unbind chunk empty empty_like empty_strided new_empty new_empty_strided "
    "lift_fresh _local_scalar_dense unfold narrow view_as_real view_as_complex diagonal numpy_T movedim"
)
FREE = frozenset(VIEWS.split(" "))
"""Operators that launch nothing."""
LOOKUPS = frozenset({"embedding", "_embedding_bag", "index_select", "index", "gather"})
"""Operators that read of their first tensor as much as they return, and not all of a table."""
NO_COST = Cost("nowhere", (), "float32")
_aten = torch.ops.aten


def cost_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Cost:
    """Return the cost of a call of an operator. It follows from the forms of its tensors."""
    is_free, count_flops = _costs(func)
    if is_free:
        return NO_COST
    inputs = [*tensors_in(args), *tensors_in(kwargs)]
    tensors = [*inputs, *tensors_in(result)]
    if not tensors:
        return NO_COST
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    moved = sum(sizes)
    if func._schema.name.removeprefix("aten::") in LOOKUPS:
        moved -= max(0, sizes[0] - sizes[len(inputs)])
    devices = {tensor.device.type for tensor in tensors if tensor.dim()}
    if "cpu" in devices:
        # A copy crosses once, however many of its tensors the operator names: `copy_` returns its argument.
        return (
            Cost("link", ((0, max(sizes)),), "float32")
            if len(devices) > 1
            else Cost("host", ((0, moved),), "float32")
        )
    flops = 0
    if count_flops is not None:
        counted = _with_heads(args) if ATTENTION in func._schema.name else args
        flops = int(count_flops(*counted, **kwargs, out_val=result))
    unit: Unit = "half" if any(tensor.dtype in HALF for tensor in inputs) else "float32"
    if func is _aten.convolution.default:
        kernels = convolution_kernels(args[0], args[1], args[8], flops, moved)
        return Cost(
            "device",
            kernels,
            of_convolution(unit, args[1], args[8]),
            is_uncertain(args[0], args[1], args[8]),
        )
    if func is _aten.convolution_backward.default:
        kernels = gradient_kernels(args[1], args[2], args[9], args[10], flops, moved)
        return Cost(
            "device",
            kernels,
            of_convolution(unit, args[2], args[9]),
            is_uncertain(args[1], args[2], args[9]),
        )
    if func is _aten.native_batch_norm.default and args[5] and is_by_channel(args[0]):
        return Cost("device", ((elements_of_channel(args[0]), moved),), "channel")
    if func is _aten.native_batch_norm_backward.default and args[7] and is_by_channel(args[1]):
        elements = int(BACKWARD_ELEMENTS * elements_of_channel(args[1]))
        return Cost("device", ((elements, moved),), "channel")
    if func is _aten.native_layer_norm_backward.default:
        return Cost("device", ((0, moved), (0, sizes[0] + sizes[1])), unit)
    return Cost("device", ((flops, moved),), unit)


def _with_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an attention's arguments as shapes with the heads of the first, which is query or gradient.

    Until 2.12 torch's counter refuses keys and values whose heads are shared.
    """
    heads = args[0].shape[1]
    return tuple(
        torch.Size((len(one), heads, *one.shape[2:]))
        if isinstance(one, Tensor) and one.dim() == 4
        else one
        for one in args
    )


def is_by_channel(given: Tensor) -> bool:
    """Return whether a batch normalization of (batch, channels, ...) has a block of threads for each channel."""
    return given.dim() > 2 and given.is_contiguous()


def elements_of_channel(given: Tensor) -> int:
    """Return how many elements a channel of (batch, channels, ...) has."""
    return given.numel() // max(1, given.shape[1])


def convolution_kernels(
    given: Tensor, weight: Tensor, groups: int, flops: int, moved: int
) -> tuple[Kernel, ...]:
    """Return a convolution's kernels; `flops` and `moved` are of all of it."""
    channels = channels_of_group(weight, groups)
    if is_depthwise(weight, groups):
        return ((window_operations(weight, flops), moved),)
    return ((padded(flops, channels, groups), moved), *layout_copies(given, moved))


def gradient_kernels(
    given: Tensor, weight: Tensor, groups: int, wanted: Sequence[bool], flops: int, moved: int
) -> tuple[Kernel, ...]:
    """Return the kernels of a convolution's backward pass, of which `wanted` are input, weight and bias."""
    of_input, of_weight = wanted[0], wanted[1]
    count = of_input + of_weight
    if not count:
        return ((flops, moved),)
    each = moved if count == 1 else int(moved * GRADIENT_SHARE)
    channels = channels_of_group(weight, groups)
    flops //= of_input + of_weight * groups  # as torch counts them
    if is_depthwise(weight, groups):
        operations = window_operations(weight, flops)
        return ((operations, each),) * of_input + (
            (operations, int(each * DEPTHWISE_SLOWDOWN)),
        ) * of_weight
    kernel = (padded(flops, channels, groups), each)
    return (kernel, *layout_copies(given, each)) * count


def channels_of_group(weight: Tensor, groups: int) -> int:
    """Return the fewer of a group's channels at either end."""
    return min(weight.shape[1], weight.shape[0] // groups)


def is_depthwise(weight: Tensor, groups: int) -> bool:
    """Return whether each channel is convolved on its own."""
    return groups > 1 and weight.shape[1] == 1 and weight.shape[0] == groups


def of_convolution(unit: Unit, weight: Tensor, groups: int) -> Unit:
    """Return a convolution's arithmetic: kernels of one channel a group are no matrix products, with no TF32."""
    has_form = weight.dtype is torch.float32 and not is_depthwise(weight, groups)
    return "convolution" if unit == "float32" and has_form else unit


def window_operations(weight: Tensor, flops: int) -> int:
    """Return the time of a depthwise convolution beyond its memory traffic; 0 if the traffic takes longer."""
    sides = weight.shape[2:]
    is_special = len(sides) == 2 and sides[0] == sides[1] and sides[0] in SPECIAL_SIDES
    return 0 if is_special or weight.dtype in HALF else int(flops * DEPTHWISE_LOADS)


def is_uncertain(given: Tensor, weight: Tensor, groups: int) -> bool:
    """Return whether a convolution is grouped and in channels_last: published times are 0.6 to 5 times planned ones."""
    if groups == 1 or is_depthwise(weight, groups) or given.dim() != 4:
        return False
    return given.is_contiguous(memory_format=torch.channels_last) and not given.is_contiguous()


def padded(flops: int, channels: int, groups: int) -> int:
    """Return the operations of a grouped convolution whose channels fill whole tiles."""
    return flops if groups == 1 else int(flops * max(1.0, GROUP_TILE / channels))


def layout_copies(given: Tensor, moved: int) -> tuple[Kernel, ...]:
    """Return the copies to channels_last of a convolution of contiguous tensors (batch, channels, h, w).

    In float32 they are made for TF32, by cards that are faster in it: `Work` leaves them out elsewhere.
    """
    if (
        given.dtype not in (*HALF, torch.float32)
        or given.dim() != 4
        or given.is_contiguous(memory_format=torch.channels_last)
    ):
        return ()
    return ((0, int(moved * LAYOUT_SHARE)),)


@functools.cache
def _costs(func: Any) -> tuple[bool, Callable[..., Any] | None]:
    """Return whether an operator launches nothing, and the counter of its floating-point operations, if it has many."""
    if func is GROUPED:  # which torch does not count
        return False, count_operations
    return func._schema.name.removeprefix("aten::") in FREE, flop_registry.get(func._overloadpacket)
