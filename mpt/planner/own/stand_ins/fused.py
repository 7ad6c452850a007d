"""Functions that a library compiles, as torchao's optimizers do with the update of a weight.

Compiled, such a function is a kernel or two that write its results and nothing between, while executed operator by
operator each of its steps makes a tensor of the weight's size: an optimizer in 8 bits would seem to need more than one
in 32. So of a call without gradients that makes nothing but elementwise results and sums, what dies before its end is
not recorded; nor are the pairs of places of which flex attention's mask of blocks is made. All else that
`torch.compile` compiles is planned as without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.trace import Trace

FUSED = {
    "__and__", "__lshift__", "__or__", "__rshift__", "__xor__",
    "_to_copy", "_unsafe_view", "amax", "amin", "arange", "argmax", "argmin", "bucketize", "cat", "clone", "gather",
    "constant_pad_nd", "empty", "empty_like", "empty_strided", "full", "full_like", "index", "lift_fresh", "max",
    "mean", "min", "new_empty", "new_zeros", "ones", "ones_like", "scalar_tensor", "searchsorted", "stack", "sum", "to",
    "zeros", "zeros_like",
}  # fmt: skip
"""Operators that are computed inside of a kernel, beside the elementwise ones."""
BLOCK_MASK = "create_block_mask"
"""Flex attention's function that looks at all pairs of places, of which a compiled one writes the blocks alone."""


@contextmanager
def functions_fused(recorder: Recorder) -> Iterator[None]:
    """Leave out what compiled functions would not write, inside the block."""
    compile_as_ever = torch.compile

    def compile_planned(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_planned, **options)
        compiled = compile_as_ever(model, **options)
        if isinstance(model, nn.Module):
            return compiled
        makes_mask = getattr(model, "__name__", "") == BLOCK_MASK
        return fused(compiled, recorder.trace, makes_mask)

    with mock.patch.object(torch, "compile", compile_planned):
        yield


def fused(function: Callable[..., Any], trace: Trace, is_known: bool = False) -> Callable[..., Any]:
    """Return a function whose calls without gradients leave no trace of what they make in between.

    `is_known`: so do all of its calls.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        start, born = len(trace.events), len(trace.storages)
        result = function(*args, **kwargs)
        if is_known or (
            not torch.is_grad_enabled()
            and all(is_fused(one.operator) for one in trace.storages[born:])
        ):
            events = trace.events[start:]
            gone = {~entry for entry in events if entry < 0 and ~entry >= born}
            trace.events[start:] = [
                entry for entry in events if (entry if entry >= 0 else ~entry) not in gone
            ]
        return result

    return call


@functools.cache
def is_fused(operator: str) -> bool:
    """Return whether an operator's result is computed inside of a kernel."""
    library, _, name = operator.partition("::")
    if name in FUSED:
        return True
    packet = getattr(getattr(torch.ops, library, None), name, None)
    overloads = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    return any(torch.Tag.pointwise in one.tags for one in overloads)
